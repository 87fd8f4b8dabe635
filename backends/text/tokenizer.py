"""A model's tokenizer and chat template: prompts to token ids, token ids to text. Loads no model, and no torch itself.

`TextCodec` is used by several threads at once: requests are encoded while answers are decoded. Encoding therefore goes
to the tokenizer's core directly, which is never reconfigured after loading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from backends.protocol.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from backends.text.call_history import in_words, one_call_each, with_call_objects, with_short_ids
from backends.text.chat_template import PromptError, Render, render_chat
from backends.text.detokenizer import Detokenizer
from backends.text.formats import REASONING_MARKS, TOOL_MARKS, opens_reasoning
from backends.text.grammar import Grammars
from backends.text.loading import ModelText, TokenizerUnusable, read_model_text
from backends.text.token_bound import TokenBound
from backends.text.token_text import TokenText
from backends.text.tool_prompt import with_tool_prompt

__all__ = ["PromptError", "TextCodec", "TokenizerUnusable"]

# Marks that end a turn. A model may write them although its files name another end of text.
CHAT_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
NUM_OPENING_TOKENS = 16  # at a prompt's end, among which the mark that opens reasoning is looked for


class TextCodec:
    """Everything about one model's text."""

    def __init__(self, text: ModelText) -> None:
        tokenizer = text.tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._apply_template = text.apply_template
        self._token_text = TokenText(tokenizer)
        self._bound = TokenBound(tokenizer)
        self.vocab_size = text.vocab_size or tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = text.eos_token_ids | _chat_ends(tokenizer)
        self.template_takes_tools = text.template_takes_tools
        self.tool_format = text.tool_format
        self.reasoning_format = text.reasoning_format
        self._marks = {with_tools: self._special_marks(with_tools=with_tools) for with_tools in (False, True)}

    @classmethod
    def load(cls, path: Path) -> TextCodec:
        """From a Hugging Face folder. Raises `TokenizerUnusable`."""
        return cls(read_model_text(path))

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. Raises `PromptError`."""
        match prompt:
            case ChatPrompt():
                # A template writes the special tokens itself.
                return self._encode(self.render(prompt), "messages", add_special_tokens=False)
            case TextPrompt(text=text):
                return self._encode(text, "prompt", add_special_tokens=True)
            case TokenPrompt(token_ids=token_ids):
                return self._checked(token_ids)

    def render(self, prompt: ChatPrompt) -> str:
        """The text that the model gets to see. Raises `PromptError`."""
        if self._apply_template is None:
            raise PromptError("This model has no chat template. Use /v1/completions with a prompt.", "messages")
        if self.template_takes_tools:
            return self._render_with_calls(prompt, self._apply_template)
        prompt = msgspec.structs.replace(prompt, messages=in_words(prompt.messages))
        if not prompt.tools:
            return render_chat(prompt, self._apply_template)
        try:
            return render_chat(with_tool_prompt(prompt), self._apply_template)
        except PromptError:  # some templates refuse system messages, or drop them
            return render_chat(with_tool_prompt(prompt, role="user"), self._apply_template)

    def _render_with_calls(self, prompt: ChatPrompt, apply_template: Render) -> str:
        """Most templates print arguments that are objects, some those that are JSON already."""
        if self.tool_format == "mistral":
            prompt = msgspec.structs.replace(prompt, messages=with_short_ids(prompt.messages))
        if not any(message.get("tool_calls") for message in prompt.messages):
            return render_chat(prompt, apply_template)
        objects = with_call_objects(prompt.messages)
        for messages in (objects, one_call_each(objects)):
            try:
                return render_chat(msgspec.structs.replace(prompt, messages=messages), apply_template)
            except PromptError:
                continue
        return render_chat(prompt, apply_template)

    def opening(self, prompt: ChatPrompt, token_ids: Sequence[int]) -> str:
        """The mark of reasoning, if the prompt's end opened it: with it, an answer's text says itself what it is."""
        if not self.reasoning_format:
            return ""
        mark, _ = REASONING_MARKS[self.reasoning_format]
        if prompt.continue_final_message:
            said = prompt.messages[-1].get("content") or ""
            return f"{mark}\n" if opens_reasoning(said, self.reasoning_format) else ""
        end = self._tokenizer.decode(list(token_ids[-NUM_OPENING_TOKENS:]), skip_special_tokens=False)
        return f"{mark}\n" if end.rstrip().endswith(mark) else ""

    def marks(self, *, with_tools: bool) -> Mapping[int, str]:
        """Special tokens that a client must see to read an answer: of reasoning, and of calls if there are tools."""
        return self._marks[with_tools]

    def _special_marks(self, *, with_tools: bool) -> dict[int, str]:
        marks = {*REASONING_MARKS.get(self.reasoning_format, ())}
        if with_tools:
            marks |= {*TOOL_MARKS.get(self.tool_format, ())}
        added = self._tokenizer.get_added_tokens_decoder()
        return {
            token_id: token.content for token_id, token in added.items() if token.special and token.content in marks
        }

    def detokenizer(
        self,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        opening: str = "",
        marks: Mapping[int, str] | None = None,
    ) -> Detokenizer:
        """For one answer."""
        return Detokenizer(self._token_text.stream(marks), stop, min_tokens=min_tokens, opening=opening)

    def spelling(self, token_id: int) -> tuple[str, bytes | None]:
        """One token as text, with U+FFFD for a part of a character, and as bytes; None for those of no text."""
        return self._token_text.spelling(token_id)

    def echo(self, prompt: Prompt, token_ids: Sequence[int], *, with_offsets: bool) -> tuple[str, list[int]]:
        """What a client is shown of its prompt, its own text or that of its token ids; and where its tokens begin."""
        decoder = self.detokenizer()
        offsets: list[int] = []
        pieces: list[str] = []
        if with_offsets or not isinstance(prompt, TextPrompt):
            for token_id in token_ids:
                offsets.append(decoder.num_characters)
                pieces.append(decoder.push(token_id))
            pieces.append(decoder.finish())
        text = prompt.text if isinstance(prompt, TextPrompt) else "".join(pieces)
        return text, offsets if with_offsets else []

    def grammars(self) -> Grammars:
        """What holds answers to grammars. Takes a third of a second for a vocabulary of 49,152."""
        return Grammars(self._tokenizer.to_str(), vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids)

    def min_tokens(self, prompt: Prompt) -> int:
        """A lower bound of the prompt's tokens, found without encoding it; 0 where none is known."""
        match prompt:
            case ChatPrompt(messages=messages):
                said = [message.get("content") for message in messages if message.get("role") == "user"]
                return self.min_tokens_of("".join(text.strip() for text in said if isinstance(text, str)))
            case TextPrompt(text=text):
                return self.min_tokens_of(text)
            case TokenPrompt(token_ids=token_ids):
                return len(token_ids)

    def min_tokens_of(self, text: str) -> int:
        return self._bound.at_least(text)

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        try:
            token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # half a surrogate pair, above all
            raise PromptError(f"The text can't be encoded: {str(error).splitlines()[0]}", param) from error
        if not token_ids:
            raise PromptError(f"{param} is empty: it must have at least one token.", param)
        return token_ids

    def _checked(self, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise PromptError("prompt is empty: it must have at least one token.", "prompt")
        bad = next((token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size), None)
        if bad is not None:
            raise PromptError(
                f"The prompt has token id {bad}; allowed are ids from 0 to {self.vocab_size - 1}.", "prompt"
            )
        return list(token_ids)


def _chat_ends(tokenizer: Tokenizer) -> frozenset[int]:
    """Only where they are tokens of their own, not pieces of text."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.content in CHAT_END_TOKENS)
