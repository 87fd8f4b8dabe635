"""What a newest token says goes on, ends the answer, or can't be told: then the answer is gone with its blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from backends.engines.answer_loop import AnswerLoop


class Recording:
    """A scheduler and the answers in one: every call that changes something, in order."""

    def __init__(self, ended: bool | Exception) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._ended = ended

    def process(self, request: SimpleNamespace) -> bool:
        if isinstance(self._ended, Exception):
            raise self._ended
        return self._ended

    def finish(self, request: SimpleNamespace) -> None:
        self.calls.append(("finish", request.request_id))

    def abort(self, request_id: str) -> None:
        self.calls.append(("abort", request_id))

    def fail(self, request_id: str, code: str, message: str) -> None:
        self.calls.append(("fail", request_id, code, message))


FAILED = ("fail", "a", "internal", "The engine failed while writing this answer: no such byte")


@pytest.mark.parametrize(
    ("ended", "is_over", "calls"),
    [
        (False, False, []),
        (True, True, [("finish", "a")]),
        (ValueError("no such byte"), True, [FAILED, ("abort", "a")]),
    ],
)
def test_an_answer_that_is_over_is_gone_with_its_blocks(ended: bool | Exception, is_over: bool, calls: list[Any]):
    both: Any = Recording(ended)
    loop = AnswerLoop(both, SimpleNamespace(), both)  # type: ignore[arg-type]
    request: Any = SimpleNamespace(request_id="a")

    assert loop.tell(request) is is_over
    assert both.calls == calls
