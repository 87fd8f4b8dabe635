from __future__ import annotations

import pytest

from backends.core.block_pool import BlockPool
from backends.core.prefix_hash import extend


def test_a_key_depends_on_its_tokens_and_on_everything_before_them():
    a, b = extend(None, [1, 2]), extend(None, [1, 3])
    assert a.block_hash != b.block_hash
    assert extend(a, [5]).block_hash != extend(b, [5]).block_hash
    assert extend(a, [5]).block_hash == extend(extend(None, [1, 2]), [5]).block_hash


def test_a_salt_in_the_first_block_separates_the_whole_chain():
    plain, salted = extend(None, [1], salt=""), extend(None, [1], salt="x")
    assert plain.block_hash != salted.block_hash
    assert extend(plain, [2]).block_hash != extend(salted, [2]).block_hash


def test_salt_and_tokens_cannot_be_mistaken_for_each_other():
    one = extend(None, [int.from_bytes(b"a" * 8, "little"), 7], salt="")
    other = extend(None, [7], salt="a" * 8)
    assert one.block_hash != other.block_hash


def test_the_digest_has_at_least_128_bits():
    assert len(extend(None, [1]).block_hash) * 8 >= 128


@pytest.mark.parametrize("collide", [b"", b"same"], ids=["empty", "constant"])
def test_with_a_digest_that_always_collides_only_the_very_same_tokens_are_found(collide):
    def digest(_: bytes) -> bytes:
        return collide

    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    first = extend(None, [1, 2], digest=digest)
    pool.mark_full(blocks[0], first)
    assert pool.find(extend(None, [1, 2], digest=digest)) is blocks[0]
    assert pool.find(extend(None, [1, 3], digest=digest)) is None
    assert pool.find(extend(None, [1, 2], salt="s", digest=digest)) is None
    assert pool.find(extend(first, [1, 2], digest=digest)) is None


def test_equal_tokens_after_different_beginnings_differ_even_when_all_digests_collide():
    def digest(_: bytes) -> bytes:
        return b"same"

    one = extend(extend(None, [1], digest=digest), [9], digest=digest)
    other = extend(extend(None, [2], digest=digest), [9], digest=digest)
    assert one.block_hash == other.block_hash
    assert not one.same_as(other)
    assert one.same_as(extend(extend(None, [1], digest=digest), [9], digest=digest))
