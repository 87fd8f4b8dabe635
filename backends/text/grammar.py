"""Grammars that answers are held to: JSON, JSON of a schema, calls of tools. Knows no sampler and no model.

The work is llguidance's: it refuses what it doesn't implement, so what is accepted is held to. A grammar is compiled
in the thread that asks, under limits of size and time; its answers are followed in the engine's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from backends.protocol.messages import GrammarSpec
from backends.text.grammar_source import GrammarError, grammar_source

COMPILE_SECONDS = 3.0
NUM_COMPILERS = 2
NUM_KEPT = 32  # compiled grammars that are kept for the next request with the same schema
MAX_ERROR_CHARS = 300


class GrammarFailed(Exception):
    """A grammar can't be followed beyond this place of an answer: it has become too complex."""


class Grammars:
    """Compiles for one tokenizer. Any thread may ask."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        compile_seconds: float = COMPILE_SECONDS,
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._compile_seconds = compile_seconds
        self._pool = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._kept: OrderedDict[GrammarSpec, _Compiled] = OrderedDict()
        self._tokenizer: Any = None
        self._unavailable = ""
        try:
            from llguidance import LLTokenizer  # noqa: PLC0415

            self._tokenizer = LLTokenizer(
                tokenizer_json,
                n_vocab=vocab_size,
                eos_token=sorted(eos_token_ids) or None,
                slices=LLTokenizer.json_slices(),
            )
        except Exception as error:  # not installed, or a kind of tokenizer that it doesn't know
            self._unavailable = _first_line(str(error) or repr(error))

    def start(self, spec: GrammarSpec) -> AnswerGrammar:
        """The grammar of a new answer. Raises `GrammarError`."""
        if self._tokenizer is None:
            raise GrammarError(f"This engine can't hold answers to a grammar: {self._unavailable}.", spec)
        with self._lock:
            compiled = self._kept.get(spec)
            if compiled is not None:
                self._kept.move_to_end(spec)
        return AnswerGrammar(compiled or self._compile_in_time(spec))

    def _compile_in_time(self, spec: GrammarSpec) -> _Compiled:
        source = grammar_source(spec)
        future = self._pool.submit(self._compile, source, spec)
        try:
            compiled = future.result(timeout=self._compile_seconds)
        except TimeoutError:
            future.cancel()
            message = f"The grammar took longer than {self._compile_seconds:g} seconds to compile. Simplify the schema."
            raise GrammarError(message, spec) from None
        with self._lock:
            self._kept[spec] = compiled
            while len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, source: str, spec: GrammarSpec) -> _Compiled:
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415

        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False))
        first_mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(f"The grammar can't be compiled: {_first_line(matcher.get_error())}.", spec)
        return _Compiled(matcher, first_mask, self._eos_token_ids)


def _first_line(text: str) -> str:
    lines = text.strip().splitlines() or [text]
    return lines[0].rstrip(". ")[:MAX_ERROR_CHARS]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar at its start. Only ever copied."""

    matcher: Any
    first_mask: bytes
    eos_token_ids: frozenset[int]


class AnswerGrammar:
    """Where one answer is in its grammar: a `TokenGrammar` of requests. One thread follows it."""

    def __init__(self, compiled: _Compiled) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._num_followed = 0

    def allowed(self, output_token_ids: Sequence[int]) -> bytes:
        if not output_token_ids:
            return self._compiled.first_mask
        self._follow(output_token_ids)
        mask: bytes = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        return self._ends() if self._matcher.is_error() else mask

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        self._follow(output_token_ids)
        if self._matcher.is_error():
            raise GrammarFailed(f"The grammar could not be followed any further: {_first_line(self._error())}.")
        return bool(self._matcher.is_stopped())

    def fresh(self) -> AnswerGrammar:
        return AnswerGrammar(self._compiled)

    def _follow(self, output_token_ids: Sequence[int]) -> None:
        """Tokens are taken once, so nothing changes when KV is computed again or elsewhere."""
        new = list(output_token_ids[self._num_followed :])
        self._num_followed += len(new)
        if new:
            self._matcher.consume_tokens(new)

    def _error(self) -> str:
        return str(self._matcher.get_error())

    def _ends(self) -> bytes:
        """What is left to an answer that can't go on."""
        mask = bytearray(len(self._compiled.first_mask))
        for token_id in self._compiled.eos_token_ids:
            mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)
