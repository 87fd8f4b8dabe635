"""What a client reads while tokens arrive is what the tokenizer says of all of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, metaspace, word_piece
from tokenizers import Tokenizer

from backends.text.detokenizer import Detokenizer
from backends.text.token_text import TokenText, byte_of_piece

examples = settings(max_examples=150, derandomize=True, deadline=None, database=None)
texts = st.text(alphabet=st.sampled_from("the stop END café 你好🙂 \n1"), max_size=30)

TOKENIZERS = {"byte level": byte_level, "metaspace": metaspace, "word piece": word_piece}


def detokenizer_of(tokenizer: Tokenizer, stop: Sequence[str] = ()) -> Detokenizer:
    return Detokenizer(TokenText(tokenizer).stream(), stop)


def deltas_of(tokenizer: Tokenizer, token_ids: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    detokenizer = detokenizer_of(tokenizer, stop)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40)


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


# --------------- characters


@examples
@given(ids_of(byte_level()))
def test_st_01_any_byte_level_tokens_give_the_text_of_a_full_decode(token_ids: list[int]) -> None:
    deltas = deltas_of(byte_level(), token_ids)

    assert "".join(deltas) == byte_level().decode(token_ids, skip_special_tokens=True)


@examples
@given(
    st.lists(
        st.integers(0, metaspace().get_vocab_size() - 1).filter(
            lambda token_id: byte_of_piece(metaspace().id_to_token(token_id)) is None
        ),
        max_size=40,
    )
)
def test_any_sentencepiece_tokens_give_the_text_of_a_full_decode(token_ids: list[int]) -> None:
    assert "".join(deltas_of(metaspace(), token_ids)) == metaspace().decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
@examples
@given(text=st.text(max_size=30).filter(lambda text: "\ufffd" not in text))
def test_any_text_comes_back_without_a_broken_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    token_ids = encoded(tokenizer, text)

    deltas = deltas_of(tokenizer, token_ids)

    assert "".join(deltas) == tokenizer.decode(token_ids) == text
    assert not any("\ufffd" in delta for delta in deltas)


@examples
@given(ids_of(word_piece()))
def test_word_pieces_are_joined_as_in_a_full_decode(token_ids: list[int]) -> None:
    assert "".join(deltas_of(word_piece(), token_ids)) == word_piece().decode(token_ids, skip_special_tokens=True)


def test_st_01_a_character_split_over_tokens_waits_until_it_is_whole() -> None:
    alphabet = byte_level().get_vocab()
    first, *middle, last = [alphabet[character] for character in "ðŁĻĤ"]  # the four bytes of 🙂

    detokenizer = detokenizer_of(byte_level())

    assert [detokenizer.push(token_id) for token_id in [first, *middle]] == ["", "", ""]
    assert detokenizer.push(last) == "🙂"


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    start = byte_level().get_vocab()["ð"]

    assert deltas_of(byte_level(), [start]) == ["", "\ufffd"]


@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
def test_invalid_bytes_never_stall_the_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    vocab = tokenizer.get_vocab()
    continuation = vocab["<0x80>"] if kind == "metaspace" else vocab["Ģ"]  # never begins a character

    deltas = deltas_of(tokenizer, [continuation] * 50)

    assert deltas == ["\ufffd"] * 50 + [""]


def test_a_whole_character_behind_invalid_bytes_is_readable() -> None:
    vocab = metaspace().get_vocab()
    the = encoded(metaspace(), "the")
    broken_then_whole = [vocab[f"<0x{byte:02X}>"] for byte in b"\xff" + "你".encode()]

    assert "".join(deltas_of(metaspace(), [*the, *broken_then_whole, *the])) == "the\ufffd你 the"


def test_a_leading_space_is_lost_only_at_the_start() -> None:
    the = encoded(metaspace(), "the")
    bytes_ = [metaspace().get_vocab()[f"<0x{byte:02X}>"] for byte in "你".encode()]

    assert "".join(deltas_of(metaspace(), the * 3)) == "the the the"
    assert "".join(deltas_of(metaspace(), [*bytes_, *the, *bytes_, *the])) == "你 the你 the"


def test_a_space_lost_at_the_start_is_the_only_one_lost() -> None:
    space, the = metaspace().get_vocab()["▁"], encoded(metaspace(), "the")

    assert "".join(deltas_of(metaspace(), [space, *the])) == " the"
    assert "".join(deltas_of(metaspace(), [space, space, space, *the])) == "   the"


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_ids_beyond_the_tokenizer_have_no_text(kind: str) -> None:
    tokenizer: Callable[[], Tokenizer] = TOKENIZERS[kind]

    assert deltas_of(tokenizer(), [tokenizer().get_vocab_size() + 7]) == ["", ""]


def test_the_cost_of_a_token_does_not_grow_with_the_answer() -> None:
    class CountingText(TokenText):
        longest = 0

        def decode(self, token_ids: list[int]) -> str:
            CountingText.longest = max(CountingText.longest, len(token_ids))
            return super().decode(token_ids)

    detokenizer = Detokenizer(CountingText(metaspace()).stream())
    for token_id in encoded(metaspace(), "the quick 你好 dog " * 50):
        detokenizer.push(token_id)

    assert 0 < CountingText.longest <= 8


# --------------------------------------------------------------- stop strings


def cut_by_characters(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule, naively: the first character that completes a stop string ends the text; then the longest wins."""
    for end in range(1, len(text) + 1):
        ended_by = [stop for stop in stops if text[:end].endswith(stop)]
        if ended_by:
            stop = max(ended_by, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
@examples
@given(text=texts, stops=st.lists(st.text(alphabet="the stopEND", min_size=1, max_size=6), max_size=4))
def test_text_ends_where_the_first_stop_string_begins(kind: str, text: str, stops: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]()
    token_ids = encoded(tokenizer, text)
    expected, stop = cut_by_characters(tokenizer.decode(token_ids), stops)

    detokenizer = detokenizer_of(tokenizer, stops)
    streamed = "".join(detokenizer.push(token_id) for token_id in token_ids) + detokenizer.finish()

    assert (streamed, detokenizer.matched_stop) == (expected, stop)


@examples
@given(ids=ids_of(byte_level()), stops=st.lists(st.text(alphabet="aett ", min_size=1, max_size=3), max_size=3))
def test_no_part_of_a_stop_string_is_ever_given_out(ids: list[int], stops: list[str]) -> None:
    given_out = ""
    detokenizer = detokenizer_of(byte_level(), stops)
    for token_id in ids:
        given_out += detokenizer.push(token_id)
        assert not any(stop in given_out for stop in stops)


def test_a_stop_string_over_token_borders_is_held_back() -> None:
    letters = [byte_level().get_vocab()[letter] for letter in "xENDy"]
    detokenizer = detokenizer_of(byte_level(), ["END"])

    assert [detokenizer.push(token_id) for token_id in letters] == ["x", "", "", "", ""]
    assert detokenizer.matched_stop == "END"
    assert detokenizer.finish() == ""


def test_what_was_held_back_comes_out_when_it_is_no_stop_string() -> None:
    letters = [byte_level().get_vocab()[letter] for letter in "ENxEN"]
    detokenizer = detokenizer_of(byte_level(), ["END"])

    assert [detokenizer.push(token_id) for token_id in letters] == ["", "", "ENx", "", ""]
    assert detokenizer.finish() == "EN"
    assert detokenizer.matched_stop is None


def test_a_stop_string_that_repeats_itself_is_found() -> None:
    letters = [byte_level().get_vocab()[letter] for letter in "aaab"]
    detokenizer = detokenizer_of(byte_level(), ["aab"])

    assert "".join(detokenizer.push(token_id) for token_id in letters) == "a"
    assert detokenizer.matched_stop == "aab"


def test_a_broken_character_at_the_end_can_complete_a_stop_string() -> None:
    vocab = byte_level().get_vocab()
    detokenizer = detokenizer_of(byte_level(), ["x\ufffd"])

    assert [detokenizer.push(vocab["x"]), detokenizer.push(vocab["ð"])] == ["", ""]
    assert (detokenizer.finish(), detokenizer.matched_stop) == ("", "x\ufffd")


def until_matched(pieces: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None]:
    """By definition: of the whole text, the first stop string that ends behind the text of `min_tokens` pieces."""
    text, allowed = "".join(pieces), len("".join(pieces[:min_tokens]))
    for end in range(allowed + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    st.integers(0, 6),
)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_stop_strings_wait_for_the_minimum_length_too(pieces, stops, min_tokens):
    class Pieces:
        def push(self, token_id):
            return pieces[token_id]

        def finish(self):
            return ""

    detokenizer = Detokenizer(Pieces(), stops, min_tokens=min_tokens)
    told = ""
    for token_id in range(len(pieces)):
        told += detokenizer.push(token_id)
        if detokenizer.matched_stop is not None:
            break
    told += detokenizer.finish()
    assert (told, detokenizer.matched_stop) == until_matched(pieces, stops, min_tokens)
