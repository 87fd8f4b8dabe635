"""Prompts become the ids that transformers gives, or a refusal that says which field is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, metaspace, word_piece
from tokenizers import Tokenizer, normalizers

from backends.protocol.messages import ChatPrompt, TextPrompt, TokenPrompt
from backends.text.loading import ModelText, TokenizerUnusable
from backends.text.tokenizer import PromptError, TextCodec

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "the quick fox"}


def write_folder(
    folder: Path,
    *,
    template: str | None = CHATML,
    tokenizer: Tokenizer | None = None,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    **tokenizer_config: Any,
) -> Path:
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    declared = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", **tokenizer_config}
    if template is not None:
        declared["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 500, **(config or {})}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def load(folder: Path, **parts: Any) -> TextCodec:
    return TextCodec.load(write_folder(folder, **parts))


def chat(*messages: dict[str, Any], **options: Any) -> ChatPrompt:
    return ChatPrompt(messages=list(messages), **options)


# ------------------------------------------------------------------------------ chat


def test_chat_is_rendered_and_special_tokens_stay_whole(tmp_path: Path) -> None:
    codec = load(tmp_path)

    assert codec.render(chat(USER)) == "<|im_start|>user\nthe quick fox<|im_end|>\n<|im_start|>assistant\n"
    ids = codec.encode_prompt(chat(USER))
    start, end = (byte_level().token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert (ids.count(start), ids.count(end)) == (2, 1)


def test_chat_ids_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    codec = load(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    messages = [USER, {"role": "assistant", "content": "déjà 你好"}, {"role": "user", "content": " 🙂\n\n1  23"}]

    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert codec.encode_prompt(chat(*messages)) == expected


def test_the_final_message_can_be_continued(tmp_path: Path) -> None:
    rendered = load(tmp_path).render(chat(USER, {"role": "assistant", "content": "It"}, continue_final_message=True))

    assert rendered.endswith("<|im_start|>assistant\nIt")


def test_tools_and_template_kwargs_reach_the_template(tmp_path: Path) -> None:
    template = "{{ tools[0].function.name }} {{ enable_thinking }} {{ messages[0].content }}"
    codec = load(tmp_path, template=template)
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]

    rendered = codec.render(chat(USER, tools=tools, template_kwargs={"enable_thinking": False}))

    assert rendered == "look_up False the quick fox"


@pytest.mark.parametrize(
    ("template", "takes_tools"),
    [
        (CHATML, False),
        ("{{ messages }}{# tools #}", False),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", True),
        ("{% generation %}{{ tools }}{% endgeneration %}", True),
        (None, False),
    ],
)
def test_whether_a_template_takes_tools_is_read_from_it(
    tmp_path: Path, template: str | None, *, takes_tools: bool
) -> None:
    assert load(tmp_path, template=template).template_takes_tools is takes_tools


def test_null_content_of_an_assistant_is_empty_where_the_template_needs_text(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}

    template = CHATML + "{{ tools or '' }}"
    assert "<|im_start|>assistant\n<|im_end|>" in load(tmp_path, template=template).render(chat(USER, call))


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([USER, {"role": "system"}], "messages[1].content"),
        ([{"role": "user", "content": " \n"}], "messages"),
        ([{"content": "no role"}], "messages"),
    ],
)
def test_messages_without_substance_are_refused(tmp_path: Path, messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(PromptError) as refusal:
        load(tmp_path).encode_prompt(chat(*messages))
    assert refusal.value.param == param


def test_cx_09_a_template_that_refuses_gives_its_reason_alone(tmp_path: Path) -> None:
    codec = load(tmp_path, template="{{ raise_exception('System role not supported') }}")

    with pytest.raises(PromptError, match="System role not supported") as refusal:
        codec.encode_prompt(chat(USER))
    assert "\n" not in str(refusal.value)
    assert "Traceback" not in str(refusal.value)


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), ZeroDivisionError("a\nb"), OSError()])
def test_rv_05_any_error_of_a_template_is_about_the_messages(error: Exception) -> None:
    def apply_template(*_: Any, **__: Any) -> str:
        raise error

    codec = TextCodec(ModelText(byte_level(), apply_template=apply_template))
    with pytest.raises(PromptError) as refusal:
        codec.encode_prompt(chat(USER))
    assert refusal.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "lost"),
    [
        ("{{ bos_token }}hello", "user"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "system"),
    ],
)
def test_cx_09_a_template_that_drops_what_was_said_is_refused(tmp_path: Path, template: str, lost: str) -> None:
    codec = load(tmp_path, template=template)
    system = {"role": "system", "content": "Be brief."}

    with pytest.raises(PromptError, match=f"drops {lost} messages"):
        codec.encode_prompt(chat(*([system] if lost == "system" else []), USER))


def test_a_template_may_move_and_trim_what_was_said(tmp_path: Path) -> None:
    template = "[{{ messages[1].content | trim }}] {{ messages[0].content | replace('\n', ' ') }}"
    system = {"role": "system", "content": "Be brief.\nBe kind."}

    rendered = load(tmp_path, template=template).render(chat(system, {"role": "user", "content": "  hi  "}))

    assert rendered == "[hi] Be brief. Be kind."


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "return_tensors"])
def test_template_kwargs_cannot_replace_our_own(tmp_path: Path, name: str) -> None:
    with pytest.raises(PromptError, match=name) as refusal:
        load(tmp_path).encode_prompt(chat(USER, template_kwargs={name: "x"}))
    assert refusal.value.param == "chat_template_kwargs"


def test_a_model_without_a_template_takes_no_messages(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no chat template"):
        load(tmp_path, template=None).encode_prompt(chat(USER))


# ------------------------------------------------------------------------------ text and ids


def test_text_gets_the_special_tokens_of_the_tokenizer() -> None:
    codec = TextCodec(ModelText(metaspace()))

    ids = codec.encode_prompt(TextPrompt(text="the quick"))

    assert ids[0] == metaspace().token_to_id("<s>")
    assert ids[1:] == metaspace().encode("the quick", add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["", "\ud800"])
def test_text_that_has_no_tokens_is_refused(text: str) -> None:
    with pytest.raises(PromptError) as refusal:
        TextCodec(ModelText(byte_level())).encode_prompt(TextPrompt(text=text))
    assert refusal.value.param == "prompt"


def test_token_ids_are_taken_as_they_are_within_the_models_vocabulary() -> None:
    codec = TextCodec(ModelText(byte_level(), vocab_size=500))

    assert codec.encode_prompt(TokenPrompt(token_ids=[499, 0])) == [499, 0]
    for bad in ([], [500], [-1]):
        with pytest.raises(PromptError) as refusal:
            codec.encode_prompt(TokenPrompt(token_ids=bad))
        assert refusal.value.param == "prompt"


def test_a_tokenizer_that_truncates_or_pads_no_longer_does() -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)

    ids = TextCodec(ModelText(tokenizer)).encode_prompt(TextPrompt(text="the quick brown fox"))

    assert ids == byte_level().encode("the quick brown fox").ids


def test_threads_encode_and_decode_at_once() -> None:
    codec = TextCodec(ModelText(byte_level()))
    text = "the quick 你好 fox 🙂 " * 20

    def there_and_back(_: int) -> str:
        ids = codec.encode_prompt(TextPrompt(text=text))
        detokenizer = codec.detokenizer(["never"])
        return "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.finish()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(there_and_back, range(64))) == {text}


# ------------------------------------------------------------------------------ end marks


def test_cx_06_every_end_that_any_file_names_is_an_end(tmp_path: Path) -> None:
    codec = load(tmp_path, config={"eos_token_id": 300}, generation={"eos_token_id": [301, 302]})

    named, im_end = byte_level().token_to_id("<|end|>"), byte_level().token_to_id("<|im_end|>")
    assert codec.eos_token_ids == {300, 301, 302, named, im_end}


def test_without_a_named_end_the_chats_own_remains(tmp_path: Path) -> None:
    assert load(tmp_path, eos_token=None).eos_token_ids == {byte_level().token_to_id("<|im_end|>")}


# ------------------------------------------------------------------------------ the bound


@pytest.mark.parametrize("tokenizer", [byte_level(), metaspace()], ids=["byte level", "metaspace"])
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(text=st.text(max_size=200) | st.text(alphabet="the ▁<|end|>\n", max_size=200))
def test_the_bound_never_exceeds_the_number_of_tokens(tokenizer: Tokenizer, text: str) -> None:
    bound = TextCodec(ModelText(tokenizer)).min_tokens_of(text)

    assert bound <= len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_the_bound_refuses_what_is_absurdly_long() -> None:
    codec = TextCodec(ModelText(byte_level()))

    assert codec.min_tokens(TextPrompt(text="x" * 10_000_000)) > 100_000
    assert codec.min_tokens(chat({"role": "user", "content": "x" * 10_000_000})) > 100_000
    assert codec.min_tokens(TokenPrompt(token_ids=[1] * 9)) == 9


def test_the_bound_survives_composition_of_characters() -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.normalizer = normalizers.NFC()
    text = "\u1112\u1161\u11ab" * 50

    assert TextCodec(ModelText(tokenizer)).min_tokens_of(text) <= len(tokenizer.encode(text).ids)


def test_there_is_no_bound_where_text_can_vanish_into_one_token() -> None:
    assert TextCodec(ModelText(word_piece())).min_tokens_of("x" * 10**6) == 0


# ------------------------------------------------------------------------------ loading


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    with pytest.raises(TokenizerUnusable, match=str(tmp_path)):
        TextCodec.load(tmp_path)


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")

    with pytest.raises(TokenizerUnusable, match=r"config\.json"):
        TextCodec.load(tmp_path)


def test_loading_and_rendering_need_no_torch(tmp_path: Path) -> None:
    write_folder(tmp_path)
    program = (
        "import sys, pathlib; from backends.text.tokenizer import TextCodec; "
        "from backends.protocol.messages import ChatPrompt; "
        "assert 'transformers' not in sys.modules; "
        "codec = TextCodec.load(pathlib.Path(sys.argv[1])); "
        "codec.encode_prompt(ChatPrompt(messages=[{'role': 'user', 'content': 'hi'}])); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
