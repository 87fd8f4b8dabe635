"""One step on the device: scheduled requests in, sampled tokens out. Knows nothing of queues or text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from backends.attention.base import AttentionBackend
from backends.attention.paged import PagedAttention
from backends.attention.reference import ReferenceAttention
from backends.core.scheduler_types import ScheduledRequest
from backends.models.base import LoadedModel
from backends.models.native_step import DecodeRows, DecodeStep
from backends.models.spec import ModelSpec
from backends.models.thread_choice import ThreadChoice
from backends.worker.input_batch import InputBatch, build_input_batch
from backends.worker.kv_cache import PagedKVCache
from backends.worker.logprobs import PromptRows, score_sampled
from backends.worker.sampler import sample


class ModelRunner:
    """Writes the new KV of every scheduled token, and samples for the requests that are caught up."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_cache: PagedKVCache,
        backend: AttentionBackend | None = None,
        decode_step: DecodeStep | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`decode_step` takes over the steps in which every request advances by one token.

        The thread that calls `execute` must be the one that made this: torch's thread count is the caller's own.
        """
        self.kv_cache = kv_cache
        self._model = loaded.model
        self._spec = loaded.spec
        self._backend = backend or ReferenceAttention()
        self._decode_step = decode_step
        self._threads = ThreadChoice(torch.get_num_threads()) if self._spec.device == "cpu" else None
        self._clock = clock

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @torch.inference_mode()
    def execute(
        self, scheduled: Sequence[ScheduledRequest], *, on_layer: Callable[[int], None] | None = None
    ) -> list[int | None]:
        """The next token of each scheduled request, None where it doesn't sample in this step.

        `on_layer(i)` is called as soon as layer i's new KV of this step is in the cache.
        """
        tokens: list[int | None] = [None] * len(scheduled)
        if not scheduled:
            return tokens
        batch = build_input_batch(scheduled, self.kv_cache.block_size, self._spec.device)
        prompt_rows = PromptRows(scheduled, batch.step.spans) if batch.scores_prompts else None
        logits = self._timed_logits(batch, prompt_rows.rows if prompt_rows else (), on_layer)
        if prompt_rows is not None and prompt_rows.rows:
            prompt_rows.score(logits[len(batch.sampling) :])
            logits = logits[: len(batch.sampling)]
        if batch.sampling:
            requests = [scheduled[index].request for index in batch.sampling]
            sampled = sample(logits, requests)
            score_sampled(logits, requests, sampled)
            for index, token_id in zip(batch.sampling, sampled, strict=True):
                tokens[index] = token_id
        return tokens

    def _timed_logits(
        self, batch: InputBatch, more_rows: Sequence[int], on_layer: Callable[[int], None] | None
    ) -> Tensor:
        """With as many threads as are faster now; see `ThreadChoice`."""
        if self._threads is None:  # a step on a device returns before it is done, and its threads aren't ours
            return self._logits(batch, more_rows, on_layer)
        num_keys = sum(span.stop for span in batch.step.spans)
        work = (len(batch.token_ids).bit_length(), num_keys.bit_length())
        num_threads = self._threads.choose(work)
        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)
        started = self._clock()
        logits = self._logits(batch, more_rows, on_layer)
        self._threads.record(work, num_threads, self._clock() - started)
        return logits

    def _logits(self, batch: InputBatch, more_rows: Sequence[int], on_layer: Callable[[int], None] | None) -> Tensor:
        """Of the rows that sample, then of `more_rows`."""
        step, num_rows = self._decode_step, len(batch.token_ids)
        single = num_rows == len(batch.step.spans) == len(batch.sampling)
        if step is not None and on_layer is None and single and num_rows <= step.max_rows:
            blocks = [span.block_ids for span in batch.step.spans]
            return step.logits(DecodeRows(batch.token_ids, batch.positions, batch.step.slot_mapping, blocks))
        attention = PagedAttention(self.kv_cache.tensor, batch.step, self._backend, on_layer)
        rows = batch.sample_rows
        if more_rows:
            rows = torch.cat((rows, torch.tensor(more_rows, dtype=rows.dtype, device=rows.device)))
        return self._model.forward(batch.token_ids, batch.positions, attention, rows)
