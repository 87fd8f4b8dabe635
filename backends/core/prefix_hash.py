"""Names for KV blocks by what they hold, so equal prefixes find each other. Pure; knows nothing of blocks or tensors.

A full block's key chains to its parent's: the same tokens after another beginning are another key. The digest makes a
lookup fast; what makes it right is the comparison of the tokens themselves, all the way to the first block. So a
digest collision costs a miss and can never serve KV of another text.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
Digest = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixKey:
    """What a full block holds and what comes before it. Only the first block of a chain carries the salt."""

    block_hash: BlockHash
    token_ids: tuple[int, ...]
    parent: PrefixKey | None
    salt: str = ""

    def same_as(self, other: PrefixKey) -> bool:
        """Whether both stand for the same tokens from the very beginning.

        Keys of cached blocks share their parents, so the walk nearly always ends at the first parent.
        """
        mine: PrefixKey | None = self
        theirs: PrefixKey | None = other
        while mine is not theirs:
            if mine is None or theirs is None:
                return False
            if mine.token_ids != theirs.token_ids or mine.salt != theirs.salt:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True


def blake2b_256(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def extend(
    parent: PrefixKey | None, token_ids: Sequence[int], *, salt: str = "", digest: Digest = blake2b_256
) -> PrefixKey:
    """The key of the full block that follows `parent`; of a first block if that is None."""
    # Layout: 1 byte for first or not, parent digest or salt (its length in front), tokens of 8 bytes each.
    tokens = array("q", token_ids).tobytes()
    if parent is None:
        salt_bytes = salt.encode()
        data = b"\0" + len(salt_bytes).to_bytes(8, "little") + salt_bytes + tokens
        return PrefixKey(BlockHash(digest(data)), tuple(token_ids), None, salt)
    return PrefixKey(BlockHash(digest(b"\1" + parent.block_hash + tokens)), tuple(token_ids), parent)
