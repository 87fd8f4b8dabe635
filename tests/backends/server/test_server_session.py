"""What an instance answers to the gateway's messages; aborts at every stage; one bad request harms no other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from test_server_preparation import CountingCodec, make_generate, make_info
from typing_extensions import override

from backends.core.request import Request
from backends.engines.base import RequestRefused
from backends.protocol.messages import (
    Abort,
    Alive,
    ChatPrompt,
    CountTokens,
    Drain,
    EngineStats,
    Failed,
    GetStats,
    Ping,
    Prompt,
    ResetPeaks,
    StatsReport,
    TextPrompt,
    TokenCount,
)
from backends.server.engine_thread import EngineThread
from backends.server.gateway_session import LOOK_AGAIN_SECONDS, GatewaySession
from backends.server.preparation import Preparer

DEADLINE_SECONDS = 10


class RecordingEngine:
    """Remembers what it was asked; unfinished until told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.refuse: Exception | None = None
        self.unfinished = 0
        self.closed = threading.Event()

    def submit(self, request: Request) -> None:
        self.calls.append(("submit", request.request_id))
        if self.refuse is not None:
            raise self.refuse

    def abort(self, request_id: str) -> None:
        self.calls.append(("abort", request_id))

    def step(self) -> bool:
        return False

    def next_deadline(self) -> float | None:
        return None

    def stats(self) -> EngineStats:
        return EngineStats(num_running=3)

    def reset_peaks(self, *, clear_prefix_cache: bool) -> None:
        self.calls.append(("reset", str(clear_prefix_cache)))

    def num_unfinished(self) -> int:
        return self.unfinished

    def close(self) -> None:
        self.closed.set()


class HeldCodec(CountingCodec):
    """Encodes only once it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.encoding = threading.Event()
        self.let_go = threading.Event()

    @override
    def encode_prompt(self, prompt: Prompt) -> list[int]:
        self.encoding.set()
        assert self.let_go.wait(DEADLINE_SECONDS)
        return super().encode_prompt(prompt)


class BrokenCodec(CountingCodec):
    @override
    def encode_prompt(self, prompt: Prompt) -> list[int]:
        raise ZeroDivisionError("secret detail")


class Setup:
    """A session around a recording engine on a real engine thread."""

    def __init__(self, codec: CountingCodec | None, encoders: ThreadPoolExecutor) -> None:
        self.engine = RecordingEngine()
        self.ended: list[BaseException | None] = []
        self.thread = EngineThread(ended=self.ended.append)
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.session = GatewaySession(
            role="merged",
            engine=self.engine,
            taker=self.engine if codec else None,
            preparer=Preparer(codec, make_info()) if codec else None,
            thread=self.thread,
            send=self.said.put_nowait,
            send_from_engine=lambda message: loop.call_soon_threadsafe(self.said.put_nowait, message) and None,
            encoders=encoders,
        )
        self.thread.start(lambda: self.engine)

    async def next_said(self) -> Any:
        return await asyncio.wait_for(self.said.get(), DEADLINE_SECONDS)

    async def settled(self) -> None:
        """Everything asked so far has reached the engine thread and was done there."""
        self.session.received(GetStats(number=0))
        assert isinstance(await self.next_said(), StatsReport)


@pytest.fixture
async def make_setup() -> AsyncIterator[Callable[..., Setup]]:
    setups: list[Setup] = []
    with ThreadPoolExecutor(2) as encoders:

        def make(codec: CountingCodec | None) -> Setup:
            setups.append(Setup(codec, encoders))
            return setups[-1]

        yield make
        for setup in setups:
            setup.engine.unfinished = 0
            setup.thread.stop_when_idle()
            assert await asyncio.to_thread(setup.engine.closed.wait, DEADLINE_SECONDS)


MakeSetup = Callable[..., Setup]


async def wait_for_event(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, DEADLINE_SECONDS)


async def until_submitted(setup: Setup) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not any(name == "submit" for name, _ in setup.engine.calls):
            await setup.settled()


async def test_a_request_reaches_the_engine(make_setup: MakeSetup):
    setup = make_setup(CountingCodec())
    setup.session.received(make_generate())
    await until_submitted(setup)

    assert setup.engine.calls == [("submit", "r")]


async def test_an_abort_that_arrives_while_its_prompt_is_encoded_wins(make_setup: MakeSetup):
    codec = HeldCodec()
    setup = make_setup(codec)
    setup.session.received(make_generate())
    await wait_for_event(codec.encoding)
    setup.session.received(Abort(request_id="r"))
    codec.let_go.set()
    setup.session.received(make_generate(request_id="later"))
    await until_submitted(setup)

    assert setup.engine.calls == [("submit", "later")]
    assert setup.said.empty()


async def test_an_abort_of_an_admitted_request_reaches_the_engine_after_it(make_setup: MakeSetup):
    setup = make_setup(CountingCodec())
    setup.session.received(make_generate())
    await until_submitted(setup)
    setup.session.received(Abort(request_id="r"))
    await setup.settled()

    assert setup.engine.calls == [("submit", "r"), ("abort", "r")]


async def test_figures_are_answered_while_a_long_prompt_is_encoded(make_setup: MakeSetup):
    codec = HeldCodec()
    setup = make_setup(codec)
    setup.session.received(make_generate())
    await wait_for_event(codec.encoding)
    setup.session.received(GetStats(number=5))

    assert await setup.next_said() == StatsReport(number=5, stats={"merged": EngineStats(num_running=3)})
    codec.let_go.set()


async def test_a_ping_is_answered_while_the_engine_thread_waits_for_work(make_setup: MakeSetup):
    setup = make_setup(CountingCodec())
    await setup.settled()
    setup.session.received(Ping(number=7))

    assert await setup.next_said() == Alive(number=7)


async def test_a_ping_to_a_stuck_engine_thread_is_answered_once_it_moves(make_setup: MakeSetup):
    setup, stuck, go_on = make_setup(CountingCodec()), threading.Event(), threading.Event()

    def get_stuck() -> None:
        stuck.set()
        assert go_on.wait(DEADLINE_SECONDS)

    await setup.settled()
    setup.session.received(Ping(number=1))
    await setup.next_said()
    setup.thread.post(get_stuck)
    await wait_for_event(stuck)
    setup.session.received(Ping(number=2))  # it moved since the first one
    assert await setup.next_said() == Alive(number=2)
    setup.session.received(Ping(number=3))
    looks_again = asyncio.Event()
    asyncio.get_running_loop().call_later(2 * LOOK_AGAIN_SECONDS, looks_again.set)
    await looks_again.wait()
    assert setup.said.empty()
    go_on.set()

    assert await setup.next_said() == Alive(number=3)


async def test_an_unknown_exception_fails_one_request_and_keeps_its_details_in_the_log(make_setup: MakeSetup):
    setup = make_setup(BrokenCodec())
    setup.session.received(make_generate())
    failed = await setup.next_said()

    assert (failed.request_id, failed.code) == ("r", "internal")
    assert "secret" not in failed.message
    await setup.settled()


async def test_a_refusal_of_the_engine_is_told_in_its_own_words(make_setup: MakeSetup):
    setup = make_setup(CountingCodec())
    setup.engine.refuse = RequestRefused("queue_full", "256 are waiting", "x")
    setup.session.received(make_generate())

    assert await setup.next_said() == Failed(request_id="r", code="queue_full", message="256 are waiting", param="x")


async def test_an_engine_that_breaks_while_admitting_keeps_nothing_of_the_request(make_setup: MakeSetup):
    setup = make_setup(CountingCodec())
    setup.engine.refuse = KeyError("bug")
    setup.session.received(make_generate())

    assert (await setup.next_said()).code == "internal"
    assert setup.engine.calls == [("submit", "r"), ("abort", "r")]


async def test_new_peaks_are_answered_with_figures(make_setup: MakeSetup):
    setup = make_setup(CountingCodec())
    setup.session.received(ResetPeaks(number=9, clear_prefix_cache=True))

    assert (await setup.next_said()).number == 9
    assert setup.engine.calls == [("reset", "True")]


async def test_a_prefill_side_refuses_requests_of_clients(make_setup: MakeSetup):
    setup = make_setup(None)
    setup.session.received(make_generate())

    assert (await setup.next_said()).code == "internal"


async def test_draining_refuses_what_is_new_and_ends_once_nothing_is_left(make_setup: MakeSetup):
    setup = make_setup(CountingCodec())
    setup.engine.unfinished = 1
    setup.session.received(Drain())
    setup.session.received(make_generate())

    assert (await setup.next_said()).code == "draining"
    await setup.settled()
    assert not setup.engine.closed.is_set()
    setup.engine.unfinished = 0
    setup.thread.wake()
    await wait_for_event(setup.engine.closed)
    assert setup.engine.calls == []


async def test_draining_waits_for_a_prompt_that_is_being_encoded(make_setup: MakeSetup):
    codec = HeldCodec()
    setup = make_setup(codec)
    setup.session.received(make_generate())
    await wait_for_event(codec.encoding)
    setup.session.received(Drain())
    await setup.settled()
    assert not setup.engine.closed.is_set()
    codec.let_go.set()
    await wait_for_event(setup.engine.closed)

    assert setup.engine.calls == [("submit", "r")]


async def test_tokens_are_counted_without_asking_the_engine(make_setup: MakeSetup):
    setup = make_setup(CountingCodec())
    setup.session.received(CountTokens(number=3, prompt=TextPrompt(text="a b c")))

    counted = await setup.next_said()
    assert counted == TokenCount(number=3, prompt_tokens=len(CountingCodec().encode_prompt(TextPrompt(text="a b c"))))
    assert setup.engine.calls == []


async def test_a_prompt_that_can_not_be_encoded_is_an_answer_to_who_counts(make_setup: MakeSetup):
    setup = make_setup(BrokenCodec())
    setup.session.received(CountTokens(number=3, prompt=ChatPrompt(messages=[])))
    counted = await setup.next_said()

    assert (counted.number, counted.failed.code) == (3, "internal")
    assert "secret" not in counted.failed.message


async def test_a_prefill_side_says_that_it_counts_nothing(make_setup: MakeSetup):
    setup = make_setup(None)
    setup.session.received(CountTokens(number=3, prompt=TextPrompt(text="a")))
    assert (await setup.next_said()).failed.code == "internal"
