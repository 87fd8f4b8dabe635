"""Reads what a Hugging Face folder says about a model's text: tokenizer, chat template, end marks, vocabulary.

transformers is imported when a folder is read, not before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from backends.text.formats import reasoning_format, tool_format

# Tokenizers that are wholly in tokenizer.json. transformers' model-specific classes take a second longer to find.
_PLAIN_CLASSES = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})


class TokenizerUnusable(Exception):
    """The model's folder has no tokenizer that can be used here: why, and what to do."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """What a `TextCodec` is made of. `apply_template` is None for models without a chat template."""

    tokenizer: Tokenizer
    apply_template: Callable[..., str] | None = None
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size: int | None = None  # the model's, which may be more than the tokenizer's; None = the tokenizer's
    template_takes_tools: bool = False
    tool_format: str = ""
    reasoning_format: str = ""


def read_model_text(folder: Path) -> ModelText:
    """Raises `TokenizerUnusable`."""
    config = _read_json(folder / "config.json")
    try:
        tokenizer = _load(folder)
    except Exception as error:  # transformers raises whatever it meets
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        raise TokenizerUnusable(f"The tokenizer in {folder} can't be loaded: {first_line}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TokenizerUnusable(
            f"The tokenizer in {folder} is of a kind without tokenizer.json ({type(tokenizer).__name__}). "
            f"Save it with transformers as a fast tokenizer and put tokenizer.json into the folder."
        )
    templates = _templates(tokenizer.chat_template)
    text_config = config.get("text_config") or config
    takes_tools = any(_reads_tools(template) for template in templates)
    return ModelText(
        tokenizer=backend,
        apply_template=tokenizer.apply_chat_template if templates else None,
        eos_token_ids=_eos_token_ids(folder, config, text_config, tokenizer),
        vocab_size=text_config.get("vocab_size"),
        template_takes_tools=takes_tools,
        tool_format=tool_format(templates, takes_tools=takes_tools),
        reasoning_format=reasoning_format(templates),
    )


def _load(folder: Path) -> Any:
    declared = _read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    if declared in _PLAIN_CLASSES and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(folder)


def _read_json(file: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerUnusable(f"{file} can't be read: {error}") from error
    return content if isinstance(content, dict) else {}


def _templates(chat_template: str | dict[str, str] | None) -> list[str]:
    if isinstance(chat_template, dict):
        return list(chat_template.values())
    return [chat_template] if chat_template else []


def _reads_tools(template: str) -> bool:
    from jinja2 import TemplateError, meta  # noqa: PLC0415
    from jinja2.ext import loopcontrols  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    try:
        tree = ImmutableSandboxedEnvironment(extensions=[loopcontrols]).parse(template)
    except TemplateError:  # a tag of transformers' own, such as {% generation %}
        return "tools" in template
    return "tools" in meta.find_undeclared_variables(tree)


def _eos_token_ids(folder: Path, config: dict[str, Any], text_config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """All that any file calls an end: they often disagree, and going past one lets the model talk to itself."""
    generation = _read_json(folder / "generation_config.json")
    named = [source.get("eos_token_id") for source in (generation, config, text_config)]
    return frozenset(_flat([*named, tokenizer.eos_token_id]))


def _flat(values: Iterable[int | list[int] | None]) -> Iterable[int]:
    for value in values:
        if isinstance(value, list):
            yield from value
        elif value is not None:
            yield value
