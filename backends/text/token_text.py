"""From token ids to text, one token at a time, whatever the tokenizer's decoder. Knows nothing of stop strings.

The cost of a token doesn't depend on how long the answer already is.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from typing import Protocol

from tokenizers import Tokenizer
from typing_extensions import override

MAX_SILENT_ANCHOR = 8  # pieces without any text that are remembered at the start of an answer


class TextStream(Protocol):
    """One answer being decoded."""

    def push(self, token_id: int) -> str:
        """The characters that this token completes; an unfinished one waits for the next tokens."""

    def finish(self) -> str:
        """What an unfinished character became."""


class TokenText:
    """What every answer of one tokenizer shares: which ids are special, and what single tokens stand for.

    Used by several threads; the caches only ever gain entries, each of which is the same whoever computes it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = _is_byte_level(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._spellings: dict[int, tuple[str, bytes | None]] = {}
        self._anchor: int | None = None
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )

    def stream(self, marks: Mapping[int, str] | None = None) -> TextStream:
        """`marks` are special tokens that are text in this answer."""
        stream: TextStream = ByteLevelStream(self) if self._is_byte_level else PieceStream(self)
        return MarkedStream(stream, marks) if marks else stream

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level tokenizer; none for special and unknown ids."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None:
            return b""
        if all(character in BYTE_OF_CHARACTER for character in token):
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        return token.encode()  # an added token, spelt as it is

    def token(self, token_id: int) -> str | None:
        """How the vocabulary spells it; None for special ids and those the tokenizer doesn't know."""
        if token_id in self.special_ids or token_id < 0:
            return None
        return self._tokenizer.id_to_token(token_id)

    def spelling(self, token_id: int) -> tuple[str, bytes | None]:
        """A single token as text, U+FFFD for a part of a character, and as bytes; None for those of no text."""
        known = self._spellings.get(token_id)
        if known is None:
            known = self._spellings[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> tuple[str, bytes | None]:
        token = self.token(token_id)
        if token is None:
            return (self._tokenizer.id_to_token(token_id) if token_id >= 0 else None) or "", None
        data = self.bytes_of(token_id) if self._is_byte_level else self._piece_bytes(token_id, token)
        return data.decode(errors="replace"), data

    def _piece_bytes(self, token_id: int, token: str) -> bytes:
        """Behind other text: there, a piece has its space."""
        byte = byte_of_piece(token)
        if byte is not None:
            return bytes([byte])
        stream = PieceStream(self)
        stream.push(self._common_piece())
        return (stream.push(token_id) + stream.finish()).encode(errors="replace")

    def _common_piece(self) -> int:
        """Some piece that is text of its own."""
        if self._anchor is None:
            ids = range(self._tokenizer.get_vocab_size(with_added_tokens=True))
            pieces = (i for i in ids if (token := self.token(i)) is not None and byte_of_piece(token) is None)
            self._anchor = next((i for i in pieces if self.decode([i]).strip().isalpha()), 0)
        return self._anchor

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    parts = decoder.get("decoders", [decoder])
    return bool(parts) and all(part.get("type") == "ByteLevel" for part in parts)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + position): byte for position, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


class MarkedStream(TextStream):
    """A stream in which some special tokens have their spelling as text."""

    def __init__(self, stream: TextStream, marks: Mapping[int, str]) -> None:
        self._stream = stream
        self._marks = marks

    @override
    def push(self, token_id: int) -> str:
        mark = self._marks.get(token_id)
        return self._stream.push(token_id) if mark is None else self._stream.finish() + mark

    @override
    def finish(self) -> str:
        return self._stream.finish()


class ByteLevelStream(TextStream):
    """Tokens are bytes: decoding is that of UTF-8, and exact in any order of tokens."""

    def __init__(self, tokens: TokenText) -> None:
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @override
    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokens.bytes_of(token_id))

    @override
    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceStream(TextStream):
    """Tokens are pieces of text (sentencepiece, WordPiece), whose text depends on whether they come first.

    Decoded is therefore the newest piece behind an anchor: a piece emitted before, whose own text is cut off again.
    Pieces like <0xE4> stand for single bytes; they wait until their character is complete or can't become one.
    """

    def __init__(self, tokens: TokenText) -> None:
        self._tokens = tokens
        self._anchor: list[int] = []
        self._anchor_is_bytes = False
        self._has_text = False
        self._pending: list[int] = []
        self._pending_bytes = b""

    @override
    def push(self, token_id: int) -> str:
        token = self._tokens.token(token_id)
        if token is None:
            return ""
        byte = byte_of_piece(token)
        if byte is None:
            return self._flush() + self._emit([token_id], is_bytes=False)
        self._pending.append(token_id)
        self._pending_bytes += bytes([byte])
        return "" if _may_become_a_character(self._pending_bytes) else self._flush()

    @override
    def finish(self) -> str:
        return self._flush()

    def _flush(self) -> str:
        pending, self._pending, self._pending_bytes = self._pending, [], b""
        return self._emit(pending, is_bytes=True) if pending else ""

    def _emit(self, token_ids: list[int], *, is_bytes: bool) -> str:
        before = self._tokens.decode(self._anchor) if self._anchor else ""
        text = self._tokens.decode([*self._anchor, *token_ids])
        # Behind bytes that it can't be joined with, a piece changes their text too: then it is decoded on its own.
        new = text[len(before) :] if text.startswith(before) else self._tokens.decode(token_ids)
        self._remember(token_ids, new, is_bytes=is_bytes)
        return new

    def _remember(self, token_ids: list[int], text: str, *, is_bytes: bool) -> None:
        """Pieces make better anchors than bytes, which would be decoded together with the bytes behind them."""
        if not self._has_text and len(self._anchor) < MAX_SILENT_ANCHOR:
            # A space that was lost for being the first still makes the next piece not the first.
            self._anchor = [*self._anchor, *token_ids]
            self._anchor_is_bytes = is_bytes
        elif text and (not is_bytes or self._anchor_is_bytes):
            self._anchor, self._anchor_is_bytes = token_ids, is_bytes
        self._has_text = self._has_text or bool(text)


def byte_of_piece(token: str) -> int | None:
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    return int(match.group(1), 16) if match else None


def _may_become_a_character(data: bytes) -> bool:
    """Not complete yet, and not broken yet."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(data) == ""
    except UnicodeDecodeError:
        return False
