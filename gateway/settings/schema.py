"""Every option of the gateway, written once. Precedence: flags, environment (KVGATE_*), settings file, defaults.

The native file is the layout form (shape A of README) plus `[engine]`, `[request]`, `[[keys]]`, `[[targets]]`,
`[[pairs]]`, `[[routes]]`, `[limits]`, `[timeouts]` and `[retry]`. Reading files, the environment and the other accepted
shapes is `importers`' work: constructing `Settings` reads nothing.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from backends.protocol.messages import TransferBackend
from gateway.core.types import CacheMode

Device = Annotated[int, Field(ge=0)]

KVDtype = Literal["auto", "fp32", "fp16", "bf16", "int8"]
VariantDtype = Literal["fp32", "fp16", "bf16", "int8"]
PairEngine = Literal["vllm", "vllm-mooncake", "sglang", "llm-d", "tensorrt-llm", "store"]
DialectName = Literal["openai_chat", "openai_completions", "openai_responses", "anthropic_messages"]
SPOKEN_BY_DEFAULT: tuple[DialectName, ...] = ("openai_chat", "openai_completions")


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)


class ServerSettings(Frozen):
    """Where the gateway listens, and the unified upstream."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0 = any free port, printed at start")
    api_base: str | None = Field(None, description="base URL of the unified upstream (TaoToken or OpenAI-compatible)")
    api_key: SecretStr | None = Field(None, description="key for api_base")
    api_key_file: str | None = Field(None, description="file that holds the key, instead of `api_key`")
    model: str | None = Field(None, description="model used when a request names none")
    name: str = Field("upstream", description="name of the api_base target, for routes and X-Cache-Backend")
    forward_client_key: bool = Field(False, description="send the client's own key to api_base when api_key is not set")
    allowed_hosts: tuple[str, ...] = Field((), description="Host names accepted besides loopback and `host`")
    watch_settings: bool = Field(True, description="read the settings again when their file or a key's file changes")
    api_max_concurrent: int | None = Field(None, ge=1, description="max_concurrent of the unified upstream")
    api_max_queued: int = Field(64, ge=0, description="max_queued of the unified upstream")
    api_price_model: str | None = Field(None, description="price_model of the unified upstream")
    api_dialects: tuple[DialectName, ...] = Field(SPOKEN_BY_DEFAULT, description="dialects of the unified upstream")
    api_health_path: str | None = Field(None, description="health_path of the unified upstream")


class CacheLayoutSettings(Frozen):
    """Which layout serves when a request does not say, and on which devices."""

    mode: CacheMode = CacheMode.MERGED
    prefill_gpus: tuple[Device, ...] = Field((), description="split: one prefill instance for each; empty = one")
    decode_gpus: tuple[Device, ...] = Field((), description="split: one decode instance for each; empty = one")
    merged_gpus: tuple[Device, ...] = Field((), description="merged: one replica for each; empty = one")
    chunk_size: int | None = Field(None, ge=1, description="default chunkSize of a request; a multiple of 64")
    enable_prefix_cache: bool = Field(True, description="default enablePrefixCache of a request")
    prefill_endpoint: str | None = Field(None, description="split at the unified upstream: its own URL, api_base")
    decode_endpoint: str | None = Field(None, description="as prefill_endpoint")


class KVCacheSettings(Frozen):
    block_size: int = Field(16, ge=1, le=1024)
    gpu_memory_utilization: float = Field(0.90, gt=0, lt=1)
    kv_cache_gib: float | None = Field(None, gt=0, description="KV pool of each instance; CPU default 1 GiB")
    num_kv_blocks: int | None = Field(None, ge=1, description="exact pool size of each instance, in blocks")
    decode_kv_limit_gb: float | None = Field(None, gt=0, description="ceiling of the decode side's pool, GiB")
    prefill_chunk_tokens: int = Field(512, ge=1, description="most prompt tokens computed in one step")
    kv_cache_dtype: KVDtype = "auto"


class SchedulerSettings(Frozen):
    max_batched_tokens: int = Field(2048, ge=1, description="token budget of a step")
    prefill_token_ratio: float = Field(
        1.0, gt=0, le=1, description="most prompt tokens of a step, as a share of its tokens, while anything decodes"
    )
    prefill_max_batch: int = Field(8, ge=1, description="split: requests in prefill at once")
    decode_max_batch: int = Field(64, ge=1, description="split: requests in decode at once")
    merged_max_batch: int = Field(64, ge=1, description="merged: requests running at once")
    max_waiting: int = Field(256, ge=0, description="requests queued in an engine; one more gets 429")
    enable_prefix_cache: bool = True


class TransferSettings(Frozen):
    kv_transfer_mode: Literal["layer", "request"] = "layer"
    backend: TransferBackend = Field("local", description="how KV moves: local (shared memory), nixl or cuda_ipc")
    max_transfer_concurrency: int = Field(4, ge=1, le=64, description="layers in transfer at once")
    handoff_timeout_seconds: float = Field(120.0, gt=0, description="longest wait of a request for its prefill")
    lease_seconds: float = Field(
        10.0, ge=0.1, le=3600, description="split: silence after which a side is taken for hung; a prefill is killed"
    )


class EngineSettings(Frozen):
    """The bundled engine. Without this table it runs only if no upstream is configured."""

    model: str = Field("smollm2", description="bundled name, Hugging Face folder, GGUF file or hub id")
    served_name: str | None = Field(None, description="name clients use; default: the bundled or folder name")
    enabled: bool = True
    modes: tuple[CacheMode, ...] = (CacheMode.MERGED, CacheMode.SPLIT)
    name: str = Field("local", description="name of this target, for routes and X-Cache-Backend")
    device: str = Field("auto", description="auto, cpu or cuda; the devices are in [cache_layout]")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    weight_dtype: Literal["auto", "fp32", "bf16", "int8", "int4"] = "auto"
    max_model_len: int | None = Field(
        None, ge=16, description="context length; beyond the model's own by RoPE scaling, if the model allows it"
    )
    merged_threads: int | None = Field(None, ge=1)
    prefill_threads: int | None = Field(None, ge=1)
    decode_threads: int | None = Field(None, ge=1)
    ready_timeout_seconds: float = Field(300.0, gt=0)
    max_restarts: int = Field(5, ge=0, description="restarts of one instance within a minute before it is given up")
    kv_cache_variants: tuple[VariantDtype, ...] = Field((), description="other KV dtypes, started when asked for")
    variant_idle_seconds: float = Field(300.0, gt=0, description="time without a request after which one is stopped")
    max_variants: int = Field(1, ge=1, description="variants that run at once, besides the main engine")

    def public_name(self) -> str:
        """The name clients use: `served_name`, else the last part of the model's path or hub id."""
        if self.served_name:
            return self.served_name
        without_drive = re.sub(r"^[A-Za-z]:(?=[/\\])", "", self.model)
        without_revision = without_drive.partition(":")[0].rstrip("/\\")
        return re.split(r"[/\\]", without_revision)[-1].removesuffix(".gguf") or self.model


class RequestSettings(Frozen):
    """Fills in what a request leaves out; never overrides what it says."""

    temperature: float | None = Field(None, ge=0, le=2)
    max_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    timeout_seconds: float | None = Field(None, gt=0, description="a request that takes longer ends with an error")


class KeySettings(Frozen):
    """A client key. Any number; each may choose the mode of requests that do not, and have limits of its own."""

    key: SecretStr
    key_file: str | None = Field(None, description="file that holds the key, instead of `key`")
    name: str
    mode: CacheMode | None = None
    salt_prefix_cache: bool = Field(False, description="share no prefix blocks with other keys")
    models: tuple[str, ...] = Field((), description="patterns (`*`, `?`) of models that it may use; empty = all")
    modes: tuple[CacheMode, ...] = Field((), description="modes that it may use; empty = both")
    requests_per_minute: int | None = Field(None, ge=1, description="requests within any minute; one more gets 429")
    tokens_per_minute: int | None = Field(None, ge=1, description="prompt and answer tokens within any minute")
    max_concurrent: int | None = Field(None, ge=1, description="requests of it at once; one more gets 429")
    budget_usd: float | None = Field(None, ge=0, description="what its requests may cost in a budget_period")
    budget_period: Literal["day", "week", "month", "total"] = Field("month", description="UTC; total = never anew")


class TargetSettings(Frozen):
    """One more place that answers: an OpenAI-compatible server, or a provider that litellm reaches."""

    name: str
    kind: Literal["openai", "litellm"] = Field("openai", description="litellm: models are named PROVIDER/MODEL")
    base_url: str | None = Field(None, description="needed for openai; litellm knows its providers' own")
    api_key: SecretStr | None = None
    api_key_file: str | None = Field(None, description="file that holds the key, instead of `api_key`")
    params: dict[str, SecretStr] = Field({}, description='litellm: more of its arguments, { aws_region_name = "..." }')
    price_model: str | None = Field(
        None, description="name in litellm's price table; {model} = the model asked for. litellm: that without saying"
    )
    forward_client_key: bool = False
    models: tuple[str, ...] = Field((), description="names listed in /v1/models; empty = ask the target")
    dialects: tuple[DialectName, ...] = Field(
        SPOKEN_BY_DEFAULT, description="client APIs that it speaks; others are translated into chat"
    )
    max_concurrent: int | None = Field(None, ge=1, description="requests there at once; others wait")
    max_queued: int = Field(64, ge=0, description="requests that wait for it; one more gets 429")
    queue_seconds: float = Field(30.0, ge=0, description="longest wait for it; then 429")
    breaker_failures: int = Field(5, ge=0, description="failures in a row after which it is left alone; 0 = never")
    breaker_seconds: float = Field(30.0, gt=0, description="for how long it is left alone")
    health_path: str | None = Field(
        None, description='path on its host that is asked whether it is well, such as "/health"; not set = never'
    )
    health_seconds: float = Field(10.0, gt=0, description="from one such question to the next")


class PairSettings(Frozen):
    """Prefill and decode servers of another engine, and merged servers of the same model: one target, both modes."""

    name: str
    engine: PairEngine = Field(description="whose protocol: how KV gets from a prefill to a decode server")
    prefill: tuple[str, ...] = Field((), description="base URLs of the prefill servers")
    decode: tuple[str, ...] = Field((), description="base URLs of the decode servers")
    merged: tuple[str, ...] = Field((), description="base URLs of servers for merged requests, replicas of one another")
    api_key: SecretStr | None = Field(None, description="key for all of them")
    api_key_file: str | None = Field(None, description="file that holds the key, instead of `api_key`")
    models: tuple[str, ...] = Field((), description="names listed in /v1/models; empty = ask a server")
    bootstrap_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="of the prefill servers (sglang, vllm-mooncake); default: as they say, or 8998",
    )
    max_running: int = Field(64, ge=1, description="requests at one decode server at once")
    merged_max_running: int | None = Field(None, ge=1, description="requests at one merged server at once")
    max_waiting: int = Field(256, ge=0, description="requests that wait for a server of a side; one more gets 429")
    queue_timeout_seconds: float = Field(30.0, gt=0, description="longest wait for a server; then 429")
    prefill_timeout_seconds: float = Field(120.0, gt=0, description="longest prefill; below the engine's own limit")
    handoff_timeout_seconds: float = Field(60.0, gt=0, description="from a prefill's end to decode's first output")
    breaker_failures: int = Field(5, ge=0, description="a server's failures in a row until it is left alone; 0 = never")
    breaker_seconds: float = Field(30.0, gt=0, description="for how long it is left alone")


class RouteSettings(Frozen):
    """Model pattern (`*` and `?`) -> target, and the name the target knows it by. The first match wins."""

    model: str
    target: str
    upstream_model: str | None = None
    fallbacks: tuple[str, ...] = Field((), description="targets that are asked, in order, if it fails")


class LimitSettings(Frozen):
    max_request_mib: float = Field(64.0, gt=0, le=1024, description="largest body, after decompression")
    max_concurrent_requests: int = Field(512, ge=1, description="requests in the gateway at once; one more gets 429")
    max_records: int = Field(1000, ge=0, description="finished requests kept for GET /v1/requests/{id}")
    max_stop_strings: int = Field(16, ge=1)


class TimeoutSettings(Frozen):
    connect_seconds: float = Field(10.0, gt=0)
    first_byte_seconds: float = Field(600.0, gt=0)
    idle_seconds: float = Field(300.0, gt=0, description="longest silence of an upstream within an answer")
    heartbeat_seconds: float = Field(5.0, gt=0, description="silence after which a stream gets a comment line")
    shutdown_seconds: float = Field(10.0, ge=0, description="time for running requests after SIGTERM")


class RetrySettings(Frozen):
    """What becomes of a request that fails before its first token. After it, nothing is sent again."""

    max_attempts: int = Field(3, ge=1, le=20, description="of one request, over all its targets; 1 = no retry")
    first_delay_seconds: float = Field(0.25, ge=0, description="longest wait before the first return to a target")
    max_delay_seconds: float = Field(5.0, ge=0, description="ceiling of the waits, which double")
    deadline_seconds: float = Field(30.0, ge=0, description="after the first attempt began; none begins later")
    max_retry_after_seconds: float = Field(5.0, ge=0, description="longest Retry-After that is waited for")
    merged_for_split: bool = Field(
        False, description="bundled engine and [[pairs]]: serve a split request merged if split fails"
    )


class Settings(Frozen):
    """Everything the gateway can be told."""

    server: ServerSettings = ServerSettings()
    cache_layout: CacheLayoutSettings = CacheLayoutSettings()
    kv_cache: KVCacheSettings = KVCacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    transfer: TransferSettings = TransferSettings()
    engine: EngineSettings | None = None
    request: RequestSettings = RequestSettings()
    keys: tuple[KeySettings, ...] = ()
    targets: tuple[TargetSettings, ...] = ()
    pairs: tuple[PairSettings, ...] = ()
    routes: tuple[RouteSettings, ...] = ()
    limits: LimitSettings = LimitSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    retry: RetrySettings = RetrySettings()

    def effective_engine(self) -> EngineSettings | None:
        """The bundled engine to run, or None: it is the default only where no upstream is configured."""
        if self.engine is not None:
            return self.engine if self.engine.enabled else None
        return None if self.server.api_base or self.targets or self.pairs else EngineSettings()


def public_dump(settings: Settings) -> dict[str, Any]:
    """All settings as plain values, every secret replaced by `***`."""
    redacted = _redact(settings.model_dump())
    assert isinstance(redacted, dict)
    return redacted


def _redact(value: object) -> object:
    if isinstance(value, SecretStr):
        return "***"
    if isinstance(value, dict):
        return {key: _redact(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_redact(inner) for inner in value]
    return str(value) if isinstance(value, CacheMode) else value


def secrets_of(settings: Settings) -> tuple[str, ...]:
    """Every secret in plain text, for the log's filter."""
    fields = [settings.server.api_key, *(key.key for key in settings.keys), *(t.api_key for t in settings.targets)]
    fields += [pair.api_key for pair in settings.pairs]
    fields += [value for target in settings.targets for value in target.params.values()]
    return tuple(secret.get_secret_value() for secret in fields if secret is not None)
