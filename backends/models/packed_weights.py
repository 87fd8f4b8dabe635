"""A model's weights in the layout its kernels want, packed once a machine and mapped by every engine process.

The two sides of a split engine, and a merged one beside them, then hold one copy in memory, and all but the first start
skip the packing. Where no file can be had the weights are the process' own, which is said in a notice. Small models
don't get a file: they are packed in no time, and would push out those that gain by it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from backends.models.packed_files import SUFFIX, mark_used, packed_dir, remove_outdated, reserve, writing
from backends.models.tensor_file import Parts, map_parts, write_parts
from backends.models.tensor_header import UnusableFile
from backends.models.weights import QUANTIZED, fingerprint, weight_files
from backends.native import build, library
from backends.user_cache import alone

logger = logging.getLogger(__name__)

MIN_MODEL_BYTES = 32 << 20
# What decides the content beside the model: a file written by other code isn't used.
SOURCES = (
    "dense.py", "dense_config.py", "dense_loader.py", "dtypes.py", "linear.py", "linear_loader.py", "quantization.py",
    "tensor_file.py", "tensor_header.py", "tensor_tree.py", "weights.py", "../native/library.py",
    "../attention/base.py",
)  # fmt: skip

Facts = dict[str, str]
MakeParts = Callable[[bool], Parts]  # told whether they are for a file, which holds every form that some role needs


@dataclass(frozen=True, slots=True)
class Loaded:
    parts: dict[str, Any]
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PackedStore:
    """Where packed weights lie, and which models get a file."""

    folder: Path
    min_model_bytes: int = MIN_MODEL_BYTES
    free_bytes: Callable[[Path], int] | None = None  # of the disk under a folder; None = as the system says

    def load(self, model: Path, choice: Facts, make_parts: MakeParts) -> Loaded:
        """The model's parts, mapped if they can be. `choice`: the data types that its weights are wanted in."""
        if sum(path.stat().st_size for path in weight_files(model)) < self.min_model_bytes:
            return Loaded(dict(make_parts(False)))
        if os.environ.get("KVGATE_WEIGHT_FILES") == "0":
            return _own(make_parts, "as KVGATE_WEIGHT_FILES=0 says")
        facts = weight_facts(model) | choice
        path = self.folder / f"{model.name}-{_digest(json.dumps(facts, sort_keys=True))}{SUFFIX}"
        try:
            return Loaded(self._map_or_write(path, facts, make_parts))
        except (OSError, UnusableFile) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            hint = " Set KVGATE_CACHE_DIR to a folder with room to share them."
            return _own(make_parts, f"no file can be had in {self.folder} ({reason})", hint)

    def _map_or_write(self, path: Path, facts: Facts, make_parts: MakeParts) -> dict[str, Any]:
        parts = _map(path, facts)
        if parts is not None:
            return parts
        with alone(self.folder):  # all instances of a first start come here: one packs, the others wait
            parts = _map(path, facts)
            if parts is not None:
                return parts
            logger.info("packing the weights of %s into %s", facts["folder"], path)
            with writing(path) as file:
                write_parts(file, facts, make_parts(True), reserve(self.folder, self.free_bytes))
            remove_outdated(path, facts)
            return map_parts(path, facts)


def default_store() -> PackedStore:
    return PackedStore(packed_dir())


def _map(path: Path, facts: Facts) -> dict[str, Any] | None:
    try:
        parts = map_parts(path, facts)
    except FileNotFoundError:
        return None
    except UnusableFile as reason:
        logger.warning("%s is made again: %s", path, reason)
        return None
    mark_used(path)
    return parts


def _own(make_parts: MakeParts, reason: str, hint: str = "") -> Loaded:
    notice = f"The weights are this process' own copy, {reason}: every engine process packs and holds one.{hint}"
    return Loaded(dict(make_parts(False)), (notice,))


# ---------------------------------------------------------------------------------------------------------- facts


def weight_facts(model: Path) -> Facts:
    """All that the packed weights of a folder depend on, beside the data types asked for."""
    return {
        "folder": str(model.resolve()),
        "content": _content(model),
        "code": _code(),
        "processor": _digest(build.processor() + torch.backends.cpu.get_cpu_capability()),
        "kernels": getattr(library.loaded_from(), "name", ""),
        "torch": str(torch.__version__),
    }


def _content(model: Path) -> str:
    """The fingerprint looks at samples; times notice what it can't see, such as one matrix edited in place."""
    paths = [model / "config.json", *weight_files(model), model / QUANTIZED]
    stats = [(path.name, path.stat()) for path in paths if path.is_file()]
    times = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    return _digest(fingerprint(model) + repr(times))


@cache
def _code() -> str:
    here = Path(__file__).parent
    return _digest("".join((here / name).read_text(encoding="utf-8") for name in SOURCES))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
