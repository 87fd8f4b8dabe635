"""Every option of the gateway, written once. Precedence: flags, environment (KVGATE_*), settings file, defaults.

The native file is the layout form (shape A of README) plus `[engine]`, `[request]`, `[[keys]]`, `[[targets]]`,
`[[routes]]`, `[limits]` and `[timeouts]`. Reading files, the environment and the other accepted shapes is `importers`'
work: constructing `Settings` reads nothing.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from gateway.core.types import CacheMode

Device = Annotated[int, Field(ge=0)]

KVDtype = Literal["auto", "fp32", "fp16", "bf16", "int8"]
VariantDtype = Literal["fp32", "fp16", "bf16", "int8"]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)


class ServerSettings(Frozen):
    """Where the gateway listens, and the unified upstream."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0 = any free port, printed at start")
    api_base: str | None = Field(None, description="base URL of the unified upstream (TaoToken or OpenAI-compatible)")
    api_key: SecretStr | None = Field(None, description="key for api_base")
    model: str | None = Field(None, description="model used when a request names none")
    name: str = Field("upstream", description="name of the api_base target, for routes and X-Cache-Backend")
    forward_client_key: bool = Field(False, description="send the client's own key to api_base when api_key is not set")
    allowed_hosts: tuple[str, ...] = Field((), description="Host names accepted besides loopback and `host`")


class CacheLayoutSettings(Frozen):
    """Which layout serves when a request does not say, and on which devices."""

    mode: CacheMode = CacheMode.MERGED
    prefill_gpus: tuple[Device, ...] = Field((), description="devices of the prefill side; one is used")
    decode_gpus: tuple[Device, ...] = Field((), description="devices of the decode side; one is used")
    merged_gpus: tuple[Device, ...] = Field((), description="devices of the merged engine; one is used")
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
    backend: Literal["local"] = "local"
    max_transfer_concurrency: int = Field(4, ge=1, le=64, description="layers in transfer at once")
    handoff_timeout_seconds: float = Field(120.0, gt=0, description="longest wait of a request for its prefill")


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
    max_model_len: int | None = Field(None, ge=16)
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
    """A client key. Any number; each may choose the mode of requests that do not."""

    key: SecretStr
    name: str
    mode: CacheMode | None = None
    salt_prefix_cache: bool = Field(False, description="share no prefix blocks with other keys")


class TargetSettings(Frozen):
    """One more OpenAI-compatible place that answers."""

    name: str
    kind: Literal["openai"] = "openai"
    base_url: str
    api_key: SecretStr | None = None
    forward_client_key: bool = False
    models: tuple[str, ...] = Field((), description="names listed in /v1/models; empty = ask the target")


class RouteSettings(Frozen):
    """Model pattern (`*` and `?`) -> target, and the name the target knows it by. The first match wins."""

    model: str
    target: str
    upstream_model: str | None = None


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
    routes: tuple[RouteSettings, ...] = ()
    limits: LimitSettings = LimitSettings()
    timeouts: TimeoutSettings = TimeoutSettings()

    def effective_engine(self) -> EngineSettings | None:
        """The bundled engine to run, or None: it is the default only where no upstream is configured."""
        if self.engine is not None:
            return self.engine if self.engine.enabled else None
        return None if self.server.api_base or self.targets else EngineSettings()


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
    return tuple(secret.get_secret_value() for secret in fields if secret is not None)
