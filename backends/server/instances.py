"""What the server drives, one kind for each role: an engine, and the codec of its texts where clients speak to it."""

from __future__ import annotations

from dataclasses import dataclass

from backends.engines.base import Engine, SplitDecodeEngine, SplitPrefillEngine
from backends.server.preparation import PromptCodec


@dataclass(frozen=True, slots=True)
class MergedInstance:
    engine: Engine
    codec: PromptCodec
    notices: tuple[str, ...] = ()  # of the machine; the engine's own are in its info


@dataclass(frozen=True, slots=True)
class DecodeInstance:
    engine: SplitDecodeEngine
    codec: PromptCodec
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillInstance:
    engine: SplitPrefillEngine
    notices: tuple[str, ...] = ()


Instance = MergedInstance | DecodeInstance | PrefillInstance
