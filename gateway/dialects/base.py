"""What a client API is to the service: a codec from its JSON to the chat form, and from events to its bytes. Pure.

OpenAI's chat completions body is the *chat form*: every other chat dialect is translated into it, so that the local
engine and an upstream that speaks only that API are asked by the same fields. Values of a dialect's own go along in
`ChatForm.context` to its renderer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from backends.protocol.messages import Usage
from gateway.core.types import ChoiceAnswer, Delta, FinishReason, Started
from gateway.dialects.sampling import Defaults, ParsedBody


@dataclass(frozen=True, slots=True)
class ChatForm:
    """A request as the body of OpenAI's chat completions, without `stream` and `stream_options`."""

    fields: dict[str, Any]
    notices: tuple[str, ...] = ()
    context: Any = None  # the dialect's own, for its renderer: names to restore, fields to echo


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What a renderer knows of the request that it answers."""

    request_id: str  # the gateway's own, 32 hexadecimal digits
    created: int  # seconds since the epoch
    model: str  # the name that the client used
    include_usage: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)  # the client's fields, decoded; prompts may be left out
    chat_context: Any = None  # `ChatForm.context`


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """An error as the web edge's table has it; each dialect says it in its own shape and, where it must, status."""

    status: int
    kind: str  # OpenAI's `type`: invalid_request_error, rate_limit_error, ...
    message: str
    param: str | None = None
    code: str | None = None  # context_length_exceeded, model_not_found, queue_full ...
    request_id: str = ""
    retry_after_seconds: float | None = None  # as the Retry-After header says; some dialects say it in the message


class Renderer(Protocol):
    """Events of one answer into the bytes of a dialect. One for each request; it may keep state.

    Of a stream: `begin`, then of each choice `start`, deltas and `end`, then `finish`; `heartbeat` between any two
    frames, also before `begin`; or `error` at any point, after which nothing follows. Of an answer in one piece:
    `whole`. Every method may return b"" for nothing to send.
    """

    def begin(self, started: Started | None) -> bytes:
        """What precedes the first choice. Called with the first delta, not before: until then errors are plain HTTP."""

    def start(self, index: int) -> bytes: ...

    def delta(self, delta: Delta) -> bytes: ...

    def end(self, index: int, reason: FinishReason, stop_reason: str | int | None = None) -> bytes: ...

    def finish(self, usage: Usage) -> bytes:
        """What follows the last choice, to the stream's very end: `[DONE]`, `message_stop`, `response.completed`."""

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        """The answer of a request that didn't ask for a stream."""

    def heartbeat(self) -> bytes:
        """What keeps the client of a silent stream from giving up: a comment, a ping, a data event."""

    def error(self, facts: ErrorFacts) -> bytes:
        """The frames that end a broken stream, in the dialect's way. Never a `[DONE]` or a clean stop."""

    def conversation(self) -> tuple[str, Any] | None:
        """After a complete answer: its id and what to remember under it, for `Dialect.expand` of a later request."""


# What was remembered under an id of the asking key's own, or None.
Lookup = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """A client API. `path` is where an upstream that speaks it takes requests, below its base URL."""

    name: str
    path: str
    parse: Callable[[Mapping[str, Any], Defaults], ParsedBody]  # for the local engine
    renderer: Callable[[AnswerContext], Renderer]
    error_body: Callable[[ErrorFacts], bytes]
    # for an upstream that speaks only OpenAI's chat; None: this is that API, or can't be translated into it
    to_chat: Callable[[Mapping[str, Any]], ChatForm] | None = None
    error_status: Callable[[ErrorFacts], int] = lambda facts: facts.status
    stream_type: str = "text/event-stream"  # the content type of a streamed answer
    takes_comments: bool = True  # whether its clients skip a comment between the frames of a stream
    # puts what was remembered of earlier turns into the fields, before `parse` or `to_chat` sees them
    expand: Callable[[Mapping[str, Any], Lookup], Mapping[str, Any]] | None = None
