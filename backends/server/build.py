"""Which engine a configuration asks for. The only module of the server that imports engines, and not before asked."""

from __future__ import annotations

from collections.abc import Callable

from backends.config import EngineConfig
from backends.core.errors import PoolTooSmall
from backends.engines.base import Emit
from backends.engines.scripted import ScriptedCodec, ScriptedEngine, start_script
from backends.engines.scripted_split import ScriptedDecodeEngine, ScriptedPrefillEngine
from backends.protocol.model_names import is_scripted
from backends.server.devices import bind_computing_threads, give_way
from backends.server.instances import DecodeInstance, Instance, MergedInstance, PrefillInstance


class StartError(Exception):
    """The instance can't serve; the message says what happened and what to do, and goes to the gateway as it is."""


def build_instance(config: EngineConfig, *, emit: Emit, wake: Callable[[], None]) -> Instance:
    """Takes seconds: loads what the role needs. `wake` may be called by threads that help the engine."""
    if is_scripted(config.model):
        return _build_scripted(config, emit)
    return _build_real(config, emit, wake)


def _build_scripted(config: EngineConfig, emit: Emit) -> Instance:
    bind_computing_threads(config)
    give_way(config)
    script, codec = start_script(config), ScriptedCodec()
    match config.role:
        case "merged":
            return MergedInstance(ScriptedEngine(config, script, emit, codec), codec)
        case "decode":
            return DecodeInstance(ScriptedDecodeEngine(config, script, emit, codec), codec)
        case "prefill":
            return PrefillInstance(ScriptedPrefillEngine(config, script))


def _build_real(config: EngineConfig, emit: Emit, wake: Callable[[], None]) -> Instance:
    """Torch is imported from here on."""
    from backends.models.spec import ModelLoadError  # noqa: PLC0415
    from backends.models.store import ModelUnavailable  # noqa: PLC0415
    from backends.server.real import build_real_instance  # noqa: PLC0415
    from backends.text.tokenizer import TokenizerUnusable  # noqa: PLC0415

    try:
        return build_real_instance(config, emit=emit, wake=wake)
    except (ModelUnavailable, ModelLoadError, TokenizerUnusable, PoolTooSmall) as error:
        raise StartError(str(error)) from error
