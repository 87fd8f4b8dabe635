"""Finds tool calls in a text that arrives in pieces, in the way that a family of models marks them. Pure.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or the bare JSON as the whole answer
    llama3    <|python_tag|>{"name": ..., "parameters": {...}}, or the bare JSON; several are divided by semicolons
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name{...}
    json      the bare JSON as the whole answer: one object or an array, in a code fence or not

A call is told once it is complete, since what has been sent can't be taken back. Everything that turns out to be no
call is text, as it was written; of the marks of a call, and of the space around them, nothing is left.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.service.call_json import MAX_HEAD, FoundCall, can_be_call, object_text, read_call
from gateway.service.json_scan import BrokenJson, JsonScan

MAX_SPACE = 1000  # characters of space before a mark that can be held back
MAX_OPENING = 300  # characters between a mark and the object behind it
PIECE = 4096  # characters that are looked at together, so that time grows with the text and not faster
_SPACE = " \t\n\r"
_JSON_OPENING = re.compile(r"\s*(\[?)\s*\{")
_BARE_OPENING = re.compile(r"(?:```(?:json)?\s*)?(\[?)\s*\{")
_NAMED_OPENING = re.compile(
    r"\s*(\[?)\s*\{|\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*\{", re.ASCII
)
_JSON_START = re.compile(r"[\s\[]*")
_BARE_START = re.compile(r"[\s\[`json]*")
_NAMED_START = re.compile(r"[^{}\"]*")
_FENCE = "```"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are marked. `opening` leads to an object's brace, `start` to anything before it."""

    mark: str | None = None
    closing: str | None = None
    takes_bare: bool = True  # the JSON alone, if the answer begins with it
    separators: str = _SPACE
    opening: re.Pattern[str] = _JSON_OPENING
    start: re.Pattern[str] = _JSON_START


SYNTAXES: dict[str, CallSyntax] = {
    "hermes": CallSyntax("<tool_call>", "</tool_call>"),
    "llama3": CallSyntax("<|python_tag|>", separators=_SPACE + ";"),
    "mistral": CallSyntax("[TOOL_CALLS]", takes_bare=False, opening=_NAMED_OPENING, start=_NAMED_START),
    "json": CallSyntax(),
}


class CallFinder:
    """One choice's text. What it gives out, joined, doesn't depend on how the text was cut."""

    def __init__(self, syntax: CallSyntax, names: frozenset[str]) -> None:
        self._syntax = syntax
        self._names = names
        self._state: Callable[[], bool] = self._between  # takes of `_held`; False: it needs more text
        self._held = ""
        self._later: deque[str] = deque()  # text that follows
        self._found: list[str | FoundCall] = []
        self._num_calls = 0
        self._is_last = False
        # of the object that is being read
        self._lead = ""  # text before it, which is given back if it is no call
        self._name: str | None = None  # where that comes before it
        self._scan = JsonScan()
        self._body: list[str] = []
        self._head = ""
        self._in_array = False
        self._in_fence = False
        self._awaits_closing = False

    def push(self, text: str) -> list[str | FoundCall]:
        """Text and calls that are certain by now."""
        self._later.extend(_pieces(text))
        return self._run()

    def finish(self) -> list[str | FoundCall]:
        """The rest. A call that isn't complete is text."""
        self._is_last = True
        return self._run()

    def _run(self) -> list[str | FoundCall]:
        while self._state() or self._later:
            if self._later:
                self._held += self._later.popleft()
        found, self._found = self._found, []
        return found

    @property
    def _ended(self) -> bool:
        return self._is_last and not self._later

    # ------------------------------------------------------------------------------------------------------- outside

    def _text(self) -> bool:
        mark = self._syntax.mark
        position = self._held.find(mark) if mark else -1
        if mark and position >= 0:
            self._give(position)
            self._lead, self._held = mark, self._held[len(mark) :]
            self._state = self._opening
            return True
        self._give(len(self._held) - (0 if self._ended or not mark else partial_end(self._held, mark)))
        return False

    def _between(self) -> bool:
        """At the answer's start and behind a call, what follows space may be a call."""
        rest = self._held.lstrip(self._syntax.separators if self._num_calls else _SPACE)
        skipped = self._held[: len(self._held) - len(rest)]
        if len(skipped) > MAX_SPACE:
            self._state = self._text
            return True
        if not rest:
            return self._wait()
        mark = self._syntax.mark
        if mark and rest.startswith(mark):
            self._lead, self._held = skipped + mark, rest[len(mark) :]
            self._state = self._opening
        elif mark and mark.startswith(rest) and not self._ended:
            return False
        elif self._syntax.takes_bare and rest[0] in "{[`":
            self._lead, self._held = skipped, rest
            self._state = self._bare_opening
        else:
            self._state = self._text
        return True

    def _behind_call(self) -> bool:
        """The rest of an array, a closing mark, the end of a fence."""
        rest = self._held.lstrip(_SPACE)
        if self._in_array:
            return self._in_an_array(rest)
        for mark in self._closings():
            if rest.startswith(mark):
                self._held = rest[len(mark) :]
                self._awaits_closing = self._in_fence = False
                break
            if mark.startswith(rest):
                return self._wait()
        self._state = self._between
        return True

    def _closings(self) -> list[str]:
        closing = self._syntax.closing if self._awaits_closing else None
        return [mark for mark in (closing, _FENCE if self._in_fence else None) if mark]

    def _in_an_array(self, rest: str) -> bool:
        if not rest:
            return self._wait()
        if rest[0] == ",":
            behind = rest[1:].lstrip(_SPACE)
            if not behind and not self._ended:
                return False
            if behind.startswith("{"):
                self._lead = self._held[: len(self._held) - len(behind)]
                self._held = behind
                self._begin_object(None)
                return True
        elif rest[0] == "]":
            self._held = rest[1:]
        self._in_array = False
        return True

    def _wait(self) -> bool:
        """Only space is held, or the beginning of a closing mark. Behind a call, space isn't text."""
        if self._ended:
            self._give(len(self._held) if self._held.strip() or not self._num_calls else 0)
            self._held = ""
        return False

    def _give(self, num_characters: int) -> None:
        if num_characters:
            self._found.append(self._held[:num_characters])
            self._held = self._held[num_characters:]

    # -------------------------------------------------------------------------------------------------------- a call

    def _opening(self) -> bool:
        return self._open(self._syntax.opening, self._syntax.start, marked=True)

    def _bare_opening(self) -> bool:
        return self._open(_BARE_OPENING, _BARE_START, marked=False)

    def _open(self, opening: re.Pattern[str], start: re.Pattern[str], *, marked: bool) -> bool:
        brace = self._held.find("{", 0, MAX_OPENING)
        if brace < 0:
            hopeless = len(self._held) >= MAX_OPENING or start.fullmatch(self._held) is None
            return self._no_call() if hopeless or self._ended else False
        found = opening.fullmatch(self._held, 0, brace + 1)
        name = found.groupdict().get("name") if found is not None else None
        if found is None or (name is not None and name not in self._names):
            return self._no_call()
        self._in_array = bool(found.group(1))
        self._in_fence = not marked and self._held.startswith(_FENCE)
        self._awaits_closing = marked
        self._lead += self._held[:brace]
        self._held = self._held[brace:]
        self._begin_object(name)
        return True

    def _begin_object(self, name: str | None) -> None:
        self._name = name
        self._scan, self._body, self._head = JsonScan(), [], ""
        self._state = self._object

    def _object(self) -> bool:
        try:
            end = self._scan.push(self._held)
        except BrokenJson:
            return self._no_call()
        if end is None:
            self._body.append(self._held)
            undecided = len(self._head) < MAX_HEAD
            self._head += self._held[:MAX_HEAD] if undecided else ""
            self._held = ""
            hopeless = undecided and self._name is None and not can_be_call(self._head, self._names)
            return self._no_call() if hopeless or self._ended else False
        text = "".join(self._body) + self._held[:end]
        call = self._read(text)
        if call is None:
            return self._no_call()
        self._held, self._body, self._lead = self._held[end:], [], ""
        self._num_calls += 1
        self._found.append(call)
        self._state = self._behind_call
        return True

    def _read(self, text: str) -> FoundCall | None:
        if self._name is None:
            return read_call(text, self._names)
        try:
            arguments = object_text(text)
        except (ValueError, RecursionError):
            return None
        return None if arguments is None else FoundCall(self._name, arguments)

    def _no_call(self) -> bool:
        """What looked like a call is text; a mark inside it may still begin one."""
        first, *rest = _pieces(self._lead + "".join(self._body) + self._held)
        self._held, self._lead, self._body = first, "", []
        self._later.extendleft(reversed(rest))
        self._in_array = self._in_fence = self._awaits_closing = False
        self._give(len(self._held) - len(self._held.lstrip(_SPACE)) + 1)
        self._state = self._text
        return True


def _pieces(text: str) -> Iterable[str]:
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def partial_end(text: str, mark: str) -> int:
    """How many characters at the end of `text` may begin `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)
