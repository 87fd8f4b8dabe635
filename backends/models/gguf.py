"""Converts one GGUF file to a Hugging Face folder. Knows nothing of the cache; run as a process by `store`.

    python -m backends.models.gguf FILE.gguf FOLDER NAME

A process of its own, so that its memory never counts as an engine's. It ends when standard input is closed, that is,
when whoever started it is gone.

Weights are stored in fp32. A 4-bit weight is fp16 scale * code + fp16 minimum, which bf16 rounds; in fp32 the floats
and the codes beside them are the same model. The file is memory-mapped, so its size costs address space, not time.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.models.cache import FORMAT, MARKER
from backends.models.gguf_tokenizer import convert_tokenizer
from backends.models.progress import say

QUANTIZED = "quantized.safetensors"

Report = Callable[[str], None]


def convert(source: Path, target: Path, name: str, sha256: str, report: Report) -> None:
    """Fill the empty folder `target`. Raises `GgufRefused` for what can't be converted faithfully."""
    from gguf import GGUFReader  # noqa: PLC0415  (half a second, and only for a conversion)

    report("reading")
    reader = GGUFReader(source)
    _refuse_unfaithful(reader)
    report("converting the config")
    config = _convert_config(source, reader, target, sha256)
    report("converting the tokenizer")
    notices = convert_tokenizer(source, reader, target, max_model_len=config.max_position_embeddings)
    for notice in notices:
        report(f"warning: {notice}")
    _convert_weights(reader, config, target, sha256, report)
    _write_marker(source, target, name, sha256, notices)


def _refuse_unfaithful(reader: Any) -> None:
    from backends.models.gguf_weights import FAMILIES, GgufRefused  # noqa: PLC0415

    architecture = reader.fields["general.architecture"].contents()
    if architecture not in FAMILIES:
        raise GgufRefused(
            f"GGUF files of architecture {architecture!r} can't be converted; accepted are "
            f"{', '.join(FAMILIES)} ({', '.join(FAMILIES.values())}). Use the model's Hugging Face folder instead."
        )
    scaling = reader.fields.get(f"{architecture}.rope.scaling.type")
    if scaling is not None and scaling.contents() != "none":
        raise GgufRefused(
            f"The GGUF file scales its rotary embedding ({scaling.contents()}), which the conversion would lose. "
            f"Use the model's Hugging Face folder instead."
        )


def _convert_config(source: Path, reader: Any, target: Path, sha256: str) -> Any:
    from transformers import AutoConfig, GenerationConfig  # noqa: PLC0415
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = "float32"
    key_length = reader.fields.get(f"{reader.fields['general.architecture'].contents()}.attention.key_length")
    if key_length is not None:  # transformers' conversion forgets it for Qwen 3
        config.head_dim = int(key_length.contents())
    config.save_pretrained(target)
    eos = _end_token_ids(reader)
    generation = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=eos[0] if len(eos) == 1 else eos or None,
        pad_token_id=config.pad_token_id,
        **_advised_sampling(sha256),
    )
    generation.save_pretrained(target)
    return config


def _advised_sampling(sha256: str) -> dict[str, Any]:
    """A GGUF file doesn't carry what its authors advise; of the bundled model it is known."""
    from backends.models.bundled import BUNDLED  # noqa: PLC0415

    advice = [dict(model.sampling) for model in BUNDLED if model.sha256 == sha256 and model.sampling]
    return {"do_sample": True, **advice[0]} if advice else {}


def _end_token_ids(reader: Any) -> list[int]:
    """The end of text first, then the ends of a turn and of a message, if the file names them."""
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    return list(dict.fromkeys(int(reader.fields[key].contents()) for key in keys if key in reader.fields))


def _convert_weights(reader: Any, config: Any, target: Path, sha256: str, report: Report) -> None:
    from backends.models.gguf_weights import AttentionHeads, code_entries, float_entries  # noqa: PLC0415
    from backends.models.safetensors_writer import write_safetensors  # noqa: PLC0415

    heads = AttentionHeads(
        reader.fields["general.architecture"].contents(), config.num_attention_heads, config.num_key_value_heads
    )
    floats, codes = float_entries(reader.tensors, heads), code_entries(reader.tensors, heads)
    _check_layers({entry.name for entry in floats}, config.num_hidden_layers)
    _check_room(target, sum(entry.num_bytes for entry in [*floats, *codes]))
    metadata = {"format": "pt", "source_sha256": sha256}
    report(f"writing {len(floats)} tensors")
    write_safetensors(target / "model.safetensors", floats, metadata)
    if codes:
        report("writing the 4- and 8-bit codes")
        write_safetensors(target / QUANTIZED, codes, metadata | {"group": "32", "layout": "value = q * d + m"})


def _check_layers(names: set[str], num_layers: int) -> None:
    """A file that lacks a layer, or a part of one that the others have, is damaged."""
    from backends.models.gguf_weights import GgufRefused  # noqa: PLC0415

    parts: dict[int, set[str]] = {layer: set() for layer in range(num_layers)}
    for name in names:
        if name.startswith("model.layers."):
            layer, part = name.removeprefix("model.layers.").split(".", 1)
            parts.setdefault(int(layer), set()).add(part)
    if len(parts) != num_layers or any(part != parts[0] for part in parts.values()):
        raise GgufRefused(f"The GGUF file says it has {num_layers} layers but doesn't hold all their tensors.")


def _check_room(target: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(target).free
    if free < num_bytes:
        raise OSError(
            f"converting needs {num_bytes / 1e6:.0f} MB in {target.parent}, but only {free / 1e6:.0f} MB are free. "
            f"Free some, or set KVGATE_CACHE_DIR to a folder on another disk."
        )


def _write_marker(source: Path, target: Path, name: str, sha256: str, notices: list[str]) -> None:
    marker = {
        "format": FORMAT,
        "name": name,
        "source": {"kind": "gguf", "file": source.name, "sha256": sha256, "size": source.stat().st_size},
        "files": {path.name: path.stat().st_size for path in sorted(target.iterdir())},
        "notices": notices,
    }
    (target / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _end_with_parent() -> None:
    while os.read(0, 4096):  # not sys.stdin: its lock would be held at our own exit
        pass
    os._exit(1)


def main(argv: list[str]) -> int:
    """Convert; progress goes to standard error, a refusal to standard output, for the parent to pass on."""
    source, target, name, sha256 = argv
    threading.Thread(target=_end_with_parent, daemon=True).start()

    try:
        convert(Path(source), Path(target), name, sha256, lambda stage: say(name, stage))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        sys.stdout.write(str(error) or repr(error))
        sys.stdout.flush()
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
