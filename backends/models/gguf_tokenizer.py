"""The tokenizer of a GGUF file as Hugging Face files. transformers converts it; here is put right what that loses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Keys that describe the machine the conversion ran on.
_LOCAL_KEYS = ("is_local", "local_files_only")


# Values of `tokenizer.ggml.pre` whose words are split as SmolLM splits them.
_DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_GPT2 = frozenset({"default", "gpt-2", "gpt2"})  # what a byte-level tokenizer does unasked


def convert_tokenizer(source: Path, reader: Any, target: Path, *, max_model_len: int) -> list[str]:
    """Write the tokenizer's files; returns what may be wrong with them, for the user to read."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokenizer = PreTrainedTokenizerFast.from_pretrained(source.parent, gguf_file=source.name)
    notices = _restore_splitting(tokenizer, reader)
    tokenizer.model_max_length = max_model_len
    tokenizer.save_pretrained(target)
    config_file = target / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in _LOCAL_KEYS}
    config_file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return notices


def _restore_splitting(tokenizer: Any, reader: Any) -> list[str]:
    """SmolLM splits digits one by one before anything else; transformers' conversion forgets it.

    It shows where spaces stand before a digit: "a  1" is a, two spaces, 1; without this it is a, space, space, 1.
    """
    from tokenizers import pre_tokenizers  # noqa: PLC0415
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS  # noqa: PLC0415

    if reader.fields["tokenizer.ggml.model"].contents() != "gpt2":
        return []  # only byte-level tokenizers name their way of splitting
    field = reader.fields.get("tokenizer.ggml.pre")
    splitting = "default" if field is None else field.contents()
    if splitting in _DIGITS_FIRST:
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif splitting not in GGUF_PRE_TOKENIZER_SPLITS and splitting not in _GPT2:
        return [f"The way this model splits text ({splitting!r}) isn't known; GPT-2's is used. Token ids may differ."]
    return []
