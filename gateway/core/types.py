"""The words of the domain: modes, strategies, requests, events. Frozen values; knows no wire format and no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from backends.protocol.messages import Prompt, SamplingParams, Timings, TokenLogprob, TransferMode, Usage


class CacheMode(StrEnum):
    """How the KV cache is laid out. The field says chunked prefill (merged) and P/D disaggregation (split)."""

    MERGED = "merged"
    SPLIT = "split"


Side = Literal["prefill", "decode", "merged"]  # what a server of `[[pairs]]` is for
SIDES: tuple[Side, ...] = ("prefill", "decode", "merged")
InstanceId = tuple[str, int]  # name and process: one that was started again has empty caches


class StrategySource(StrEnum):
    """The channel a cache mode came by, in order of precedence."""

    HEADER = "header"
    BODY = "body"
    QUERY = "query"
    PATH = "path"
    MODEL = "model"
    KEY = "key"
    DEFAULT = "default"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class CacheStrategy:
    """The cache layout one request asks for. None = whatever serves decides."""

    mode: CacheMode
    source: StrategySource
    requested: str | None = None  # as the client spelt it; None when nobody asked
    chunk_size: int | None = None  # tokens, a multiple of 64
    kv_cache_dtype: str = "auto"
    enable_prefix_cache: bool = True
    transfer_mode: TransferMode | None = None
    prefill_endpoint: str | None = None
    decode_endpoint: str | None = None
    cache_salt: str = ""
    notices: tuple[str, ...] = ()  # what was adjusted or has no effect; goes to the client as X-Kvgate-Notice


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request in the internal form. `model` is the name the client used, with a mode suffix removed."""

    request_id: str
    model: str
    prompt: Prompt
    sampling: SamplingParams
    strategy: CacheStrategy
    stream: bool
    include_usage: bool = False
    deadline_seconds: float | None = None
    notices: tuple[str, ...] = ()
    session: str | None = None  # the same for all turns of one conversation: they should meet their cache


# Events of one answer, in order: Started, Delta*, Finished. A failure is a GatewayError raised by the stream.
# With several choices their deltas are mixed; each choice ends by ChoiceFinished, the last one by Finished.


@dataclass(frozen=True, slots=True)
class Started:
    """Admitted and valid. Nothing was computed yet."""

    prompt_tokens: int
    max_tokens: int
    notices: tuple[str, ...] = ()
    instance: str = ""  # that took the request; "" = not known
    instance_reason: str = ""  # why it was chosen


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text. `num_tokens` tokens were generated for it; text may be empty while characters are held back."""

    text: str
    num_tokens: int
    index: int = 0  # of the choice
    logprobs: Sequence[TokenLogprob] | None = None  # of the tokens of this delta; None = not asked for


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """One of several choices has ended, others go on."""

    index: int
    reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_reason: str | int | None = None
    index: int = 0  # the choice that this ends; usage and timings are of all


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of the model's reasoning, which is told apart from its answer."""

    text: str
    num_tokens: int = 0
    index: int = 0  # of the choice


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Text of a choice, read as calls: `name` begins call number `call`, `arguments` goes on with it.

    Calls of a choice are numbered from 0 and never interleave: call 1 begins after call 0 is complete.
    """

    index: int  # of the choice
    call: int
    call_id: str
    name: str = ""
    arguments: str = ""


Delta = TextDelta | ReasoningDelta | ToolCallDelta
StreamEvent = Started | Delta | ChoiceFinished | Finished


@dataclass(slots=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChoiceAnswer:
    """One choice of an answer that is told in one piece."""

    index: int
    text: str = ""
    reasoning: str = ""
    num_reasoning_tokens: int = 0  # as far as the deltas said
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    calls: list[ToolCall] = field(default_factory=list)
    reason: FinishReason = FinishReason.ERROR


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of /v1/models. `extra` keeps what an upstream said beyond it."""

    id: str
    target: str
    owned_by: str = "kvgate"
    created: int = 0
    max_model_len: int | None = None
    modes: tuple[CacheMode, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Route:
    """A routing decision: which target serves, the name it knows the model by, and why."""

    target: str
    upstream_model: str
    reason: str
