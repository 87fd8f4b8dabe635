"""Every message between the gateway, an engine instance and its peer. Knows nothing of sockets, torch or HTTP.

All messages are tagged msgspec structs; `ToEngine`, `FromEngine` and the two peer unions are the closed sets that a
decoder accepts. Times are seconds; instants are `time.monotonic()` of one host, which all its processes share.
"""

from __future__ import annotations

import builtins
from typing import Any, Literal

from msgspec import Struct, field

PROTOCOL_VERSION = 3

Role = Literal["merged", "prefill", "decode"]
TransferMode = Literal["layer", "request"]
TransferBackend = Literal["local", "nixl", "cuda_ipc"]
FinishReason = Literal["stop", "length", "abort", "error"]


class Message(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of everything that crosses a socket."""


# ---------------------------------------------------------------------------------------------- values inside messages


class Tool(Struct, frozen=True, array_like=True):
    """A function that may be called; `parameters` is the JSON text of its schema."""

    name: str
    parameters: str


class GrammarSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer's text must be: a JSON object, JSON of a schema (its JSON text), or calls of tools.

    A call is written `{"name":...,"arguments":{...}}`; with `max_calls` above 1 the text is an array of 1 to that many.
    """

    kind: Literal["json_object", "json_schema", "tool_calls"]
    schema: str = ""
    tools: tuple[Tool, ...] = ()
    max_calls: int = 1


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen, when to stop, and what is told. Checked by `backends.core.sampling_check`.

    The neutral values are the defaults; `temperature` 0 is greedy. `seed` makes an answer the same in any batch;
    None draws a fresh seed. `max_tokens` None means: up to the context's end; 0 only with `echo`.

    `logprobs` and `prompt_logprobs` ask for the logprob of each token and of that many likeliest ones at its place:
    the log-softmax of the model's raw logits, before penalties, temperature, filters and grammar. A request that asks
    for `prompt_logprobs` computes its whole prompt: it reads no prefix cache.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1  # independent answers to one prompt, their seeds derived from `seed`
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False  # the prompt's text comes first
    grammar: GrammarSpec | None = None  # ends the answer itself: stop strings and token ids have no effect


class CacheParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The per-request part of the cache strategy that an engine acts on."""

    chunk_size: int | None = None  # most prompt tokens of this request in one step (merged only)
    kv_cache_dtype: str = "auto"  # anything but "auto" must be the engine's own
    enable_prefix_cache: bool = True  # False: neither reads nor writes the prefix cache
    cache_salt: str = ""  # requests with different salts share no prefix blocks
    transfer_mode: TransferMode | None = None  # split only; None = the engine's setting


class ChatPrompt(Message, frozen=True, kw_only=True, tag="chat"):
    """Messages in OpenAI chat form, content already reduced to text or null; rendered by the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    continue_final_message: bool = False
    forced_calls: int = 0  # most calls that the answer must consist of; see `backends.text.tool_prompt`


class TextPrompt(Message, frozen=True, kw_only=True, tag="text"):
    text: str


class TokenPrompt(Message, frozen=True, kw_only=True, tag="tokens"):
    token_ids: list[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class TokenScore(Struct, frozen=True, array_like=True):
    """A token's logprob and the likeliest tokens at its place, as ids."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class TokenLogprob(Struct, frozen=True, array_like=True):
    """A `TokenScore` for clients. `text` has U+FFFD where the token is a part of a character.

    `bytes` is None for special tokens, which are no text; `logprob` is None for a prompt's first token; `offset` is
    where in the choice's text the token, or the character it is a part of, begins.
    """

    text: str
    bytes: builtins.bytes | None
    logprob: float | None
    offset: int = 0
    top: list[TokenLogprob] = []


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens found in the prefix cache of the side that computes the prompt


class Timings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one request's time went, seen by the engine. A phase that did not happen stays 0."""

    queue_seconds: float = 0.0  # admitted -> first scheduled
    prefill_seconds: float = 0.0  # first scheduled -> first token sampled
    transfer_seconds: float = 0.0  # time during which KV of this request was being copied between instances
    transfer_overlapped_seconds: float = 0.0  # the part of it during which the prefill was still computing
    transfer_bytes: int = 0
    slot_wait_seconds: float = 0.0  # split: admitted -> the decode side's blocks reserved; part of `queue_seconds`
    decode_wait_seconds: float = 0.0  # split: first token known -> first decode step scheduled
    first_decode_step_seconds: float = 0.0  # split: how long the first decode step of this request took
    # split: the prompt's tokens by where their KV came from: hit + computed = held + transferred = the prompt
    prefill_hit_tokens: int = 0  # in the prefill side's prefix cache (`cached_tokens`)
    computed_tokens: int = 0  # computed by the prefill side for this request
    decode_held_tokens: int = 0  # held by the decode side already, so not transferred
    transferred_tokens: int = 0
    decode_seconds: float = 0.0  # first token sampled -> last token sampled
    num_preemptions: int = 0
    peak_kv_blocks: dict[str, int] = {}  # role -> most blocks in use on that instance while the request lived
    peak_memory_bytes: dict[str, int] = {}  # role -> highest resident (CPU) or allocated (CUDA) memory of that process


class EngineStats(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A snapshot of one instance. Counters only grow while the process lives; peaks since the last `ResetPeaks`."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_in_use: int = 0  # held by requests; blocks kept only for the prefix cache are not in use
    num_blocks_cached: int = 0
    peak_blocks_in_use: int = 0
    memory_bytes: int = 0
    shared_memory_bytes: int = 0  # the part of it of which other instances may hold the same pages: weights, KV, code
    peak_memory_bytes: int = 0
    cuda_allocated_bytes: int = 0
    cuda_reserved_bytes: int = 0
    cuda_device_used_bytes: int = 0  # NVML's figure for the device
    num_preemptions: int = 0
    num_steps: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    transferred_bytes: int = 0
    decode_held_tokens: int = 0  # split, decode side: prompt tokens that were there already and not transferred
    transferred_tokens: int = 0  # split, decode side: prompt tokens that came from a prefill side
    stale_seconds: float = 0.0  # the gateway's remark: age of these figures, of an instance in a long step


class EngineInfo(Struct, frozen=True, kw_only=True):
    """What an instance serves; sent once when it is ready, and compared when a prefill and a decode side pair."""

    role: Role
    pid: int
    served_name: str
    name: str = ""  # of this instance, as its configuration says
    model_path: str
    model_fingerprint: str  # same weights and config <=> same string
    max_model_len: int  # the usable length: the model's, or what the KV pool can hold if that is less
    vocab_size: int
    block_size: int
    num_blocks: int
    kv_cache_dtype: str
    kv_bytes_per_token: int
    weight_dtype: str
    device: str
    num_threads: int
    template_takes_tools: bool = False
    tool_format: str = ""  # how the model marks calls in its text; see `backends.text.formats`
    reasoning_format: str = ""
    rope_scaling: str = ""  # how the model's context was extended, such as "yarn, factor 4"; "" = it wasn't
    native_max_model_len: int = 0  # the context that the model was made for
    default_sampling: dict[str, float] = {}  # what the model's authors advise for requests that say nothing
    notices: tuple[str, ...] = ()  # what was adjusted or assumed at start, for the log and /ready


# ------------------------------------------------------------------------------------------------- gateway -> engine


class Generate(Message, frozen=True, kw_only=True, tag="generate"):
    """Ask for one completion. Answered by `Accepted`, `TokenChunk`s and `Done`; or by `Failed` at any point."""

    request_id: str  # the gateway's own, unique; never the client's
    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    cache: CacheParams = CacheParams()
    deadline_seconds: float | None = None  # from arrival; Failed("timeout") afterwards


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Stop a request and free what it holds. Answered by nothing; unknown ids are ignored."""

    request_id: str


class GetStats(Message, frozen=True, kw_only=True, tag="get_stats"):
    """Answered by `StatsReport` with the same number, between two steps."""

    number: int


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Answered by `Alive` with the same number as soon as the engine thread is seen to move, in a long step too."""

    number: int


class ResetPeaks(Message, frozen=True, kw_only=True, tag="reset_peaks"):
    """Start new peaks of blocks and memory; `clear_prefix_cache` also forgets every block that no request holds."""

    number: int
    clear_prefix_cache: bool = False


class CountTokens(Message, frozen=True, kw_only=True, tag="count_tokens"):
    """How many tokens a prompt has. Answered by `TokenCount` with the same number; nothing is computed."""

    number: int
    prompt: Prompt


class Drain(Message, frozen=True, kw_only=True, tag="drain"):
    """Accept nothing new, finish what runs, then exit 0."""


ToEngine = Generate | Abort | GetStats | ResetPeaks | CountTokens | Drain | Ping

# ------------------------------------------------------------------------------------------------- engine -> gateway


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    info: EngineInfo
    protocol_version: int = PROTOCOL_VERSION


class StartFailed(Message, frozen=True, kw_only=True, tag="start_failed"):
    """The instance cannot serve; it exits after this. `message` says what happened and what to do."""

    message: str


class PeerState(Message, frozen=True, kw_only=True, tag="peer_state"):
    """Decode side only: whether a compatible prefill side is connected. `reason` names a refusal or a loss."""

    connected: bool
    reason: str = ""
    peer: str = ""  # the prefill instance's name, as the gateway gave it with the socket
    hung: bool = (
        False  # its lease ran out: it must be killed, since it may still write into blocks that are held for it
    )


class Accepted(Message, frozen=True, kw_only=True, tag="accepted"):
    """The request is valid and admitted to the queue; sent before any token. `max_tokens` is after clamping."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    notices: tuple[str, ...] = ()


class TokenChunk(Message, frozen=True, kw_only=True, tag="chunk"):
    """New output of choice `index`. `text` never ends inside a character and may be empty while text is held back.

    `logprobs`, where asked for, are of `token_ids` without an end mark; in the chunk without `token_ids` that carries
    an echo, of the prompt's tokens. `finish_reason` ends one of several choices; `Done` ends the last one.
    """

    request_id: str
    text: str
    token_ids: list[int]
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Done(Message, frozen=True, kw_only=True, tag="done"):
    request_id: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    text: str = ""  # text that was held back until now
    stop_reason: str | int | None = None  # the stop string or token id that ended the answer
    index: int = 0  # the choice that ended last; usage and timings are of all of them


FailureCode = Literal[
    "invalid_request",  # the client's fault; `param` names the field
    "context_length_exceeded",
    "kv_pool_too_small",  # the prompt can never fit the pool
    "queue_full",
    "timeout",
    "peer_lost",  # split: the other side died
    "transfer_failed",
    "draining",
    "internal",
]


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    request_id: str
    code: FailureCode
    message: str
    param: str | None = None


class StatsReport(Message, frozen=True, kw_only=True, tag="stats"):
    number: int
    stats: dict[str, EngineStats] = field(default_factory=dict)  # role -> snapshot; one entry, the sender's own


class TokenCount(Message, frozen=True, kw_only=True, tag="token_count"):
    number: int
    prompt_tokens: int = 0
    failed: Failed | None = None  # why the prompt could not be encoded


class Alive(Message, frozen=True, kw_only=True, tag="alive"):
    number: int


FromEngine = Alive | Ready | StartFailed | PeerState | Accepted | TokenChunk | Done | Failed | StatsReport | TokenCount

# ------------------------------------------------------------------------------------ decode side <-> prefill side


class Pair(Message, frozen=True, kw_only=True, tag="pair"):
    """First message of a decode side. The descriptor of its KV memory travels beside it, if the backend has one."""

    info: EngineInfo
    kv_memory_bytes: int
    transfer_backend: str = "local"
    kv_memory_metadata: bytes = b""  # what else the backend needs to reach the memory; opaque to everyone but it
    lease_seconds: float = 10.0  # either side takes the other for hung after that long without any message
    protocol_version: int = PROTOCOL_VERSION


class Paired(Message, frozen=True, kw_only=True, tag="paired"):
    info: EngineInfo


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Renews the sender's lease. Sent by either side whenever it said nothing for a third of `lease_seconds`."""


class PairRefused(Message, frozen=True, kw_only=True, tag="pair_refused"):
    """Names what differs: model, block size, KV dtype or version."""

    reason: str


class Prefill(Message, frozen=True, kw_only=True, tag="prefill"):
    """Compute this prompt, write its KV into the decode side's blocks and sample the first token.

    `block_ids` are the decode side's, enough for the prompt, and stay reserved until `Prefilled`, `PrefillFailed` or
    `Released` is answered, whatever happens to the request in between: until then this side may still write to them.
    """

    request_id: str
    token_ids: list[int]
    block_ids: list[int]
    sampling: SamplingParams
    cache: CacheParams
    transfer_mode: TransferMode
    seed: int
    num_held_tokens: int = 0  # the first blocks hold the KV of these tokens already: they must not be written
    eos_token_ids: list[int] = []  # the end marks that `min_tokens` keeps from being sampled
    allowed_first_tokens: bytes | None = None  # a grammar's: bit `i % 8` of byte `i // 8` is token i's; None = all


class CancelPrefill(Message, frozen=True, kw_only=True, tag="cancel_prefill"):
    """Stop; answered by `Released` (or by `Prefilled`/`PrefillFailed` if that was already on its way)."""

    request_id: str


ToPrefill = Pair | Prefill | CancelPrefill | Heartbeat


class PrefillStarted(Message, frozen=True, kw_only=True, tag="prefill_started"):
    """The request was scheduled for the first time at `at` (monotonic)."""

    request_id: str
    at: float
    cached_tokens: int


class Prefilled(Message, frozen=True, kw_only=True, tag="prefilled"):
    """All KV of the prompt is in the decode side's blocks; `token_id` is the first output token."""

    request_id: str
    token_id: int
    first_scheduled_at: float
    sampled_at: float
    cached_tokens: int
    transfer_seconds: float
    transfer_overlapped_seconds: float
    transfer_bytes: int
    num_preemptions: int
    peak_kv_blocks: int
    peak_memory_bytes: int
    score: TokenScore | None = None  # of `token_id`, where `logprobs` was asked for
    prompt_scores: list[TokenScore] = []  # of the prompt's tokens from the second on, where asked for


class PrefillFailed(Message, frozen=True, kw_only=True, tag="prefill_failed"):
    request_id: str
    code: FailureCode
    message: str


class Released(Message, frozen=True, kw_only=True, tag="released"):
    """This side holds nothing of the request and will not write to its blocks again."""

    request_id: str


FromPrefill = Paired | PairRefused | PrefillStarted | Prefilled | PrefillFailed | Released | Heartbeat
