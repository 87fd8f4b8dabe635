"""A dense model's decode step recorded as CUDA graphs, one for each number of rows; others are padded to the next.

A decode step launches hundreds of small kernels, and a graph launches them all at once. Recorded kernels read and write
fixed memory: a step copies its inputs there, plans attention, replays, and copies the logits out.

Padding repeats a row of the step. It then writes that row's key and value to that row's slot once more, so no slot
outside the step is written, and no block has to be kept free for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from backends.attention.base import PagedStep
from backends.attention.flashinfer import FixedDecode, FlashInferAttention
from backends.attention.paged import PagedAttention
from backends.models.base import LoadedModel
from backends.models.dense import DenseModel
from backends.models.native_step import DecodeRows, DecodeStep, StepUnavailable

SIZES = (1, 2, 4, 8, 16, 32)


class Graphs(Protocol):
    """Records what a function launches."""

    def capture(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Calls it, perhaps more than once; the result launches the same again and gives the same tensor, refilled."""


class CudaGraphs(Graphs):
    """Graphs of one device. They share their memory, so a graph's result lasts until any of them is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    @override
    def capture(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        with torch.cuda.device(self._device):
            self._warm_up(compute)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                output = compute()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def _warm_up(self, compute: Callable[[], Tensor]) -> None:
        """Off the default stream, so that nothing is chosen, compiled or allocated while recording."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(stream)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One graph and the memory that it reads."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: FixedDecode
    replay: Callable[[], Tensor]


class CudaGraphStep(DecodeStep):
    def __init__(self, recorded: Sequence[_Recorded]) -> None:
        self._recorded = sorted(recorded, key=lambda one: len(one.slots))
        self.max_rows = len(self._recorded[-1].slots)

    @override
    @torch.inference_mode()  # the recorded memory was made in it
    def logits(self, rows: DecodeRows) -> Tensor:
        num_rows = len(rows.token_ids)
        graph = next(one for one in self._recorded if len(one.slots) >= num_rows)
        lengths = [position + 1 for position in rows.positions.tolist()]
        shortest = lengths.index(min(lengths))  # the row that costs least to repeat
        order = [*range(num_rows), *[shortest] * (len(graph.slots) - num_rows)]
        for fixed, given in (
            (graph.token_ids, rows.token_ids),
            (graph.positions, rows.positions),
            (graph.slots, rows.slots),
        ):
            fixed[:num_rows] = given
            fixed[num_rows:] = given[shortest]
        graph.attention.plan([rows.block_ids[row] for row in order], [lengths[row] for row in order])
        return graph.replay()[:num_rows].clone()  # the next replay writes over it


def make_cuda_graph_step(
    loaded: LoadedModel, kv: Tensor, attention: FlashInferAttention, graphs: Graphs, sizes: Sequence[int] = SIZES
) -> CudaGraphStep:
    """Record the graphs. To be called before the cache is used: recording computes, and writes to slot 0.

    Raises StepUnavailable for a model whose launches may differ from step to step.
    """
    model = loaded.model
    if not isinstance(model, DenseModel):
        raise StepUnavailable("CUDA graphs are for this project's own decoder")
    max_pages = -(-loaded.spec.max_model_len // kv.shape[3])
    # the largest first: the smaller ones then fit into its memory
    return CudaGraphStep(
        [_record(model, kv, attention, graphs, num_rows=n, max_pages=max_pages) for n in sorted(sizes, reverse=True)]
    )


@torch.inference_mode()
def _record(
    model: DenseModel, kv: Tensor, shared: FlashInferAttention, graphs: Graphs, *, num_rows: int, max_pages: int
) -> _Recorded:
    token_ids, positions, slots = (torch.zeros(num_rows, dtype=torch.int64, device=kv.device) for _ in range(3))
    rows = torch.arange(num_rows, device=kv.device)
    attention = FixedDecode(
        shared,
        kv,
        [layer.attention for layer in model.weights.layers],
        num_heads=model.config.num_heads,
        num_rows=num_rows,
        max_pages=max_pages,
    )
    attention.plan([[0]] * num_rows, [1] * num_rows)

    def compute() -> Tensor:
        paged = PagedAttention(kv, PagedStep((), slots), attention)
        return model.forward(token_ids, positions, paged, rows)

    return _Recorded(token_ids, positions, slots, attention, graphs.capture(compute))
