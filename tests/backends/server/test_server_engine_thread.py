"""The thread that drives an engine: order, wake-ups, the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from backends.protocol.framing import Decoder
from backends.protocol.messages import FromEngine, TokenChunk
from backends.server.engine_thread import EngineThread, Outlet

DEADLINE_SECONDS = 10


class ScriptedSteps:
    """An engine that does what its script says, one call a step; then has nothing to do."""

    def __init__(self, *script: Callable[[], None]) -> None:
        self.script = list(script)
        self.num_idle_steps = 0
        self.deadline: float | None = None
        self.closed = threading.Event()

    def step(self) -> bool:
        if not self.script:
            self.num_idle_steps += 1
            return False
        self.script.pop(0)()
        return True

    def next_deadline(self) -> float | None:
        return self.deadline

    def num_unfinished(self) -> int:
        return len(self.script)

    def close(self) -> None:
        self.closed.set()


class Ended:
    """What the thread said of its end."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.happened = threading.Event()

    def __call__(self, error: BaseException | None) -> None:
        self.error = error
        self.happened.set()


def chunk(number: int) -> TokenChunk:
    return TokenChunk(request_id="r", text=str(number), token_ids=[number])


async def test_what_one_step_says_is_one_write():
    writes: list[bytes] = []
    outlet = Outlet(asyncio.get_running_loop(), writes.append)
    ended = Ended()
    thread = EngineThread(ended)
    thread.add_outlet(outlet)

    def say(*numbers: int) -> Callable[[], None]:
        return lambda: [outlet.send(chunk(number)) for number in numbers] and None

    thread.stop_when_idle()
    thread.start(lambda: ScriptedSteps(say(1, 2, 3), say(4)))
    assert await asyncio.to_thread(ended.happened.wait, DEADLINE_SECONDS)
    await asyncio.sleep(0)

    decoder: Decoder[FromEngine] = Decoder(FromEngine)
    assert [list(decoder.feed(data)) for data in writes] == [[chunk(1), chunk(2), chunk(3)], [chunk(4)]]
    assert ended.error is None


def test_calls_are_run_in_order_in_the_engine_thread_between_steps():
    order: list[str] = []
    engine = ScriptedSteps()
    ended = Ended()
    thread = EngineThread(ended)
    for name in ("a", "b"):
        thread.post(lambda name=name: order.append(name + threading.current_thread().name))
    thread.stop_when_idle()
    thread.start(lambda: engine)

    assert ended.happened.wait(DEADLINE_SECONDS)
    assert order == ["aengine", "bengine"]
    assert engine.closed.is_set()


def test_an_exception_that_an_engine_lets_out_ends_the_thread_with_it():
    def break_down() -> None:
        raise RuntimeError("a bug")

    ended = Ended()
    EngineThread(ended).start(lambda: ScriptedSteps(break_down))

    assert ended.happened.wait(DEADLINE_SECONDS)
    assert str(ended.error) == "a bug"


def test_an_engine_that_can_not_be_built_ends_the_thread_with_the_reason():
    def build() -> ScriptedSteps:
        raise FileNotFoundError("no weights")

    ended = Ended()
    EngineThread(ended).start(build)

    assert ended.happened.wait(DEADLINE_SECONDS)
    assert isinstance(ended.error, FileNotFoundError)


def test_a_deadline_wakes_an_idle_engine():
    woken = threading.Event()
    engine = ScriptedSteps()
    started = time.monotonic()

    def step() -> bool:
        if engine.deadline is not None and time.monotonic() >= engine.deadline:
            engine.deadline = None
            woken.set()
        return False

    engine.step = step  # type: ignore[method-assign]
    engine.deadline = started + 0.02
    ended = Ended()
    thread = EngineThread(ended)
    thread.start(lambda: engine)

    assert woken.wait(DEADLINE_SECONDS)
    thread.stop_when_idle()
    assert ended.happened.wait(DEADLINE_SECONDS)


def test_an_idle_engine_is_not_asked_again_and_again():
    engine = ScriptedSteps()
    ended = Ended()
    thread = EngineThread(ended)
    thread.start(lambda: engine)
    for _ in range(5):
        done = threading.Event()
        thread.post(done.set)
        assert done.wait(DEADLINE_SECONDS)
    thread.stop_when_idle()

    assert ended.happened.wait(DEADLINE_SECONDS)
    assert engine.num_idle_steps <= 7  # one a wake-up
