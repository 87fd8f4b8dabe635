"""Which prefill side computes a prompt: affinity, load, and how far one may outweigh the other."""

import pytest

from backends.core.prefix_hash import BlockHash
from backends.engines.split.peer import PeerId
from backends.engines.split.prefill_choice import PrefillChoice

P, Q = PeerId("p", 1), PeerId("q", 2)
BLOCK_SIZE = 10


def make_choice(*, max_blocks: int = 100) -> PrefillChoice:
    choice = PrefillChoice(block_size=BLOCK_SIZE)
    for peer in (P, Q):
        choice.add(peer, max_blocks=max_blocks)
    return choice


def hashes(text: str) -> list[BlockHash]:
    """One block a letter; a prefix of the text is a prefix of the blocks."""
    return [BlockHash(text[: index + 1].encode()) for index in range(len(text))]


def test_the_least_loaded_side_is_chosen_and_equals_take_turns():
    choice = make_choice()
    chosen = []
    for number in range(4):
        peer = choice.choose([P, Q], hashes("x"))
        choice.asked(peer, f"r{number}", hashes("x"), num_tokens=10)
        chosen.append(peer)

    assert chosen == [P, Q, P, Q]
    choice.answered(Q, "r1")
    choice.answered(Q, "r3")
    assert choice.choose([P, Q], hashes("y")) == Q
    assert choice.outstanding_tokens(P) == 20


def test_the_longest_computed_prefix_draws_a_prompt():
    choice = make_choice()
    choice.computed(P, hashes("ab"))
    choice.computed(Q, hashes("abcd"))

    assert choice.choose([P, Q], hashes("abcdef")) == Q
    assert choice.choose([P, Q], hashes("abX")) == P
    assert choice.choose([P, Q], hashes("X")) == P
    assert choice.choose([P], hashes("abcdef")) == P


def test_a_hit_only_counts_up_to_the_first_missing_block():
    choice = make_choice()
    choice.computed(P, hashes("abcd")[1:])
    choice.computed(Q, hashes("a"))

    assert choice.choose([P, Q], hashes("abcd")) == Q


@pytest.mark.parametrize(("num_behind", "chosen"), [(39, P), (40, P), (41, Q)])
def test_imbalance_beats_affinity_where_it_costs_more_than_the_hit_saves(num_behind: int, chosen: PeerId):
    choice = make_choice()
    choice.computed(P, hashes("abcd"))  # worth 40 tokens
    choice.asked(P, "other", (), num_tokens=num_behind)

    assert choice.choose([P, Q], hashes("abcde")) == chosen


def test_what_is_asked_of_a_side_counts_without_what_it_holds():
    choice = make_choice()
    choice.computed(P, hashes("ab"))
    choice.asked(P, "r", hashes("abc"), num_tokens=32)

    assert choice.outstanding_tokens(P) == 12


def test_a_side_that_is_gone_is_forgotten_with_what_it_held():
    choice = make_choice()
    choice.computed(P, hashes("abcd"))
    choice.asked(P, "r", (), num_tokens=5)
    choice.forget(P)
    choice.answered(P, "r")
    choice.computed(P, hashes("abcd"))  # said before it went
    choice.add(PeerId("p", 3), max_blocks=100)

    assert choice.outstanding_tokens(PeerId("p", 3)) == 0
    choice.computed(Q, hashes("a"))
    assert choice.choose([PeerId("p", 3), Q], hashes("abcd")) == Q


def test_no_more_blocks_are_remembered_than_a_side_can_hold_and_the_latest_beginnings_stay():
    choice = make_choice(max_blocks=3)
    choice.computed(P, hashes("abc"))
    choice.computed(P, hashes("xy"))

    side = choice._sides[P]
    assert side.num_hits(hashes("xy")) == 2
    assert side.num_hits(hashes("abc")) == 1
    assert len(side.computed) == 3
