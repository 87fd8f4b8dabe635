"""What is measured of a server: one function per measure, and the figures each of them gives. Knows no server by name.

A measure runs once per repeat on prompts of its own; a figure is the median over repeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from msgspec import Struct

from gateway.bench.cells import Better
from gateway.bench.engines.samples import CompletionClient, Sample
from gateway.bench.engines.sizes import Prompts, Sizes
from gateway.bench.percentiles import percentile
from gateway.bench.process import BenchError
from gateway.bench.tasks import all_or_first_error


class Unsupported(BenchError):
    """The server can't do what the measure needs; it isn't a fault."""


@dataclass(frozen=True, slots=True)
class Server:
    """What a measure may use."""

    client: CompletionClient
    prompts: Prompts
    sizes: Sizes
    max_streams: int | None = None  # None = any number at once


Values = dict[str, float]
MeasureFunction = Callable[[Server, int], Awaitable[Values]]


async def decode(server: Server, repeat: int) -> Values:
    sizes = server.sizes
    prompt = server.prompts.make(sizes.short_prompt, "decode", repeat)
    return {"decode": (await server.client.complete(prompt, sizes.decode_output)).decode_rate}


async def decode_long(server: Server, repeat: int) -> Values:
    sizes = server.sizes
    prompt = server.prompts.make(sizes.long_prompt, "decode-long", repeat)
    return {"decode-long": (await server.client.complete(prompt, sizes.long_decode_output)).decode_rate}


async def prefill(server: Server, repeat: int) -> Values:
    return {"prefill": await _prefill_rate(server, server.sizes.medium_prompt, repeat)}


async def prefill_long(server: Server, repeat: int) -> Values:
    return {"prefill-long": await _prefill_rate(server, server.sizes.long_prompt, repeat)}


async def _prefill_rate(server: Server, num_tokens: int, repeat: int) -> float:
    prompt = server.prompts.make(num_tokens, "prefill", num_tokens, repeat)
    return num_tokens / (await server.client.complete(prompt, 2)).ttft_seconds


async def load(server: Server, repeat: int) -> Values:
    """Output tokens a second of short requests in a closed loop."""
    samples, seconds = await _closed_loop(server, server.sizes.load_prompt, repeat)
    return {"load": sum(sample.output_tokens for sample in samples) / seconds}


async def load_long(server: Server, repeat: int) -> Values:
    """Prompt and output tokens a second of longer requests in a closed loop."""
    samples, seconds = await _closed_loop(server, server.sizes.medium_prompt, repeat)
    return {"load-long": sum(sample.prompt_tokens + sample.output_tokens for sample in samples) / seconds}


async def _closed_loop(server: Server, num_prompt: int, repeat: int) -> tuple[list[Sample], float]:
    """All samples, and the time from the first request sent to the last answer ended."""
    sizes, samples = server.sizes, list[Sample]()
    prompts = iter(
        [server.prompts.make(num_prompt, "load", num_prompt, repeat, i) for i in range(sizes.num_load_requests)]
    )
    started_at = server.client.clock()
    async with all_or_first_error() as group:
        for _ in range(sizes.num_streams):
            group.create_task(_lane(server, prompts, samples))
    return samples, server.client.clock() - started_at


async def _lane(server: Server, prompts: Iterator[list[int]], samples: list[Sample]) -> None:
    for prompt in prompts:
        samples.append(await server.client.complete(prompt, server.sizes.load_output))


async def prefix(server: Server, repeat: int) -> Values:
    """TTFT of a request whose long prefix was computed by the one before, as a share of that one's."""
    sizes = server.sizes
    shared = server.prompts.make(sizes.long_prompt, "prefix", repeat)
    tails = [server.prompts.make(sizes.prefix_tail, "tail", repeat, i) for i in range(2)]
    first, second = [(await server.client.complete(shared + tail, 2)).ttft_seconds for tail in tails]
    return {"prefix": 100 * second / first, "prefix-first": first * 1000, "prefix-second": second * 1000}


async def stall(server: Server, repeat: int) -> Values:
    """Gaps between pieces of text of running streams: alone, and while a long prompt is computed."""
    sizes = server.sizes
    if server.max_streams is not None and server.max_streams <= sizes.num_stalled_streams:
        raise Unsupported(f"it answers {server.max_streams} at a time")
    streams = Streams(server)
    try:
        indices = range(sizes.num_stalled_streams)
        streams.start([server.prompts.make(sizes.short_prompt, "stall", repeat, i) for i in indices])
        await streams.until_each_has(sizes.stream_warm_up)
        quiet_from = server.client.clock()
        await streams.until_each_has(sizes.stream_warm_up + sizes.stream_quiet)
        quiet_to = server.client.clock()
        arriving = await server.client.complete(server.prompts.make(sizes.long_prompt, "stall", repeat), 2)
        busy_to = arriving.text_at[0]
        await streams.until_each_is_past(busy_to)  # so that the gap during which it ended is whole
    finally:
        await streams.stop()
    quiet = streams.gaps(quiet_from, quiet_to)
    busy = streams.gaps(arriving.sent_at, busy_to)
    if not busy or not quiet:
        raise BenchError("the running streams had no gap to look at")
    return {"stall": percentile(busy, 99) * 1000, "stall-alone": percentile(quiet, 99) * 1000}


class Streams:
    """Requests that are answered while something else happens. They never end by themselves."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._samples: list[Sample] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        client = self._server.client
        for prompt in prompts:
            sample = Sample(client.clock())
            answer = client.stream(prompt, self._server.sizes.stream_output, sample, self._changed.set)
            self._samples.append(sample)
            self._tasks.append(asyncio.create_task(answer))

    async def until_each_has(self, num_pieces: int) -> None:
        await self._until(lambda sample: len(sample.text_at) >= num_pieces)

    async def until_each_is_past(self, at: float) -> None:
        await self._until(lambda sample: sample.text_at[-1] > at)

    async def _until(self, is_so: Callable[[Sample], bool]) -> None:
        while not all(is_so(sample) for sample in self._samples):
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait({changed, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            self._require_running()

    def _require_running(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()  # its own error, if that is why
                raise BenchError("a running stream ended before the long prompt was answered")

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def gaps(self, start: float, stop: float) -> list[float]:
        """Of all streams, every gap that overlaps the interval."""
        return [gap for sample in self._samples for gap in gaps_within(sample.text_at, start, stop)]


def gaps_within(instants: Sequence[float], start: float, stop: float) -> list[float]:
    """Whole gaps between consecutive instants, of those that overlap the interval."""
    return [after - before for before, after in pairwise(instants) if before < stop and after > start]


class Figure(Struct, frozen=True, kw_only=True):
    """One line of the table. `label` may name sizes, such as {long_prompt}."""

    name: str
    measure: str  # what `--rows` selects
    label: str
    unit: str
    better: Better

    def text(self, sizes: Sizes) -> str:
        return self.label.format(**{name: format(getattr(sizes, name), ",") for name in sizes.__slots__})


MEMORY = "memory"  # read once, after the other measures

MEASURES: dict[str, MeasureFunction] = {
    "decode": decode,
    "decode-long": decode_long,
    "prefill": prefill,
    "prefill-long": prefill_long,
    "load": load,
    "load-long": load_long,
    "stall": stall,
    "prefix": prefix,
}

ROWS = (*MEASURES, MEMORY)


def _figure(name: str, measure: str, label: str, unit: str, better: Better) -> Figure:
    return Figure(name=name, measure=measure, label=label, unit=unit, better=better)


FIGURES: tuple[Figure, ...] = (
    _figure("decode", "decode", "decode, 1 stream, {short_prompt}-token prompt", "tok/s", "more"),
    _figure("decode-long", "decode-long", "decode, 1 stream, after {long_prompt} tokens", "tok/s", "more"),
    _figure("prefill", "prefill", "prefill of {medium_prompt} tokens", "tok/s", "more"),
    _figure("prefill-long", "prefill-long", "prefill of {long_prompt} tokens", "tok/s", "more"),
    _figure("load", "load", "{num_streams} at once, {load_prompt} in / {load_output} out: output", "tok/s", "more"),
    _figure(
        "load-long",
        "load-long",
        "{num_streams} at once, {medium_prompt} in / {load_output} out: total",
        "tok/s",
        "more",
    ),
    _figure("stall", "stall", "token gap p99, {long_prompt}-token prompt arriving", "ms", "less"),
    _figure("stall-alone", "stall", "  the same {num_stalled_streams} streams without it", "ms", "less"),
    _figure("prefix", "prefix", "same {long_prompt}-token prefix again: TTFT", "% of 1st", "less"),
    _figure("prefix-first", "prefix", "  TTFT of the first request", "ms", "less"),
    _figure("prefix-second", "prefix", "  TTFT of the second request", "ms", "less"),
    _figure("memory", MEMORY, "resident memory of the engine process", "MiB", "less"),
    _figure("memory-pss", MEMORY, "  of it, shared pages by share (PSS)", "MiB", "less"),
)
