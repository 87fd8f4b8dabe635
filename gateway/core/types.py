"""The words of the domain: modes, strategies, requests, events. Frozen values; knows no wire format and no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from backends.protocol.messages import Prompt, SamplingParams, Timings, TransferMode, Usage


class CacheMode(StrEnum):
    """How the KV cache is laid out. The field says chunked prefill (merged) and P/D disaggregation (split)."""

    MERGED = "merged"
    SPLIT = "split"


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


# Events of one answer, in order: Started, TextDelta*, Finished. A failure is a GatewayError raised by the stream.


@dataclass(frozen=True, slots=True)
class Started:
    """Admitted and valid. Nothing was computed yet."""

    prompt_tokens: int
    max_tokens: int
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text. `num_tokens` tokens were generated for it; text may be empty while characters are held back."""

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_reason: str | int | None = None


StreamEvent = Started | TextDelta | Finished


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
