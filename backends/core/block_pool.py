"""Paged KV blocks: who owns which block. Pure bookkeeping; knows nothing of tensors or devices."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backends.core.prefix_hash import BlockHash, PrefixKey


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    block_id: int
    ref_count: int = 0
    key: PrefixKey | None = None  # set once the block is full, if its request may share it


class BlockPool:
    """All KV blocks, and the order in which free ones are reused.

    A freed block keeps its key, so a later request can take it back as a prefix hit until
    someone else needs the space. Free blocks are reused least recently freed first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"A KV pool needs at least 1 block, not {num_blocks}.")
        self._blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self._free = OrderedDict((block.block_id, block) for block in self._blocks)
        self._cached: dict[BlockHash, KVCacheBlock] = {}
        self.num_frees = 0  # grows whenever there may be more room than before
        self.peak_blocks_in_use = 0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_blocks_in_use(self) -> int:
        """Blocks held by requests; those kept only for the prefix cache are free."""
        return len(self._blocks) - len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a prefix hit can find, in use or free."""
        return len(self._cached)

    def allocate(self, num_blocks: int) -> list[KVCacheBlock] | None:
        """Take blocks off the free list, or return None and change nothing."""
        if num_blocks > self.num_free_blocks:
            return None
        taken = [self._take_oldest_free() for _ in range(num_blocks)]
        self._note_peak()
        return taken

    def find_prefix(self, keys: Iterable[PrefixKey]) -> list[KVCacheBlock]:
        """Return the longest cached run of blocks, in order. Read only: `touch` them to keep them."""
        hit: list[KVCacheBlock] = []
        for key in keys:
            block = self.find(key)
            if block is None:
                break
            hit.append(block)
        return hit

    def find(self, key: PrefixKey) -> KVCacheBlock | None:
        """The cached block that holds exactly this, or None. Read only."""
        block = self._cached.get(key.block_hash)
        if block is None or block.key is None or not block.key.same_as(key):
            return None
        return block

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold cached blocks once more, taking them off the free list if nobody held them."""
        for block in blocks:
            self._free.pop(block.block_id, None)
            block.ref_count += 1
        self._note_peak()

    def mark_full(self, block: KVCacheBlock, key: PrefixKey) -> None:
        """Name what a block holds, so that `find` can return it unless an equal one is there already."""
        cached = self._cached.setdefault(key.block_hash, block)
        if cached is not block and cached.key is not None and cached.key.same_as(key):
            key = cached.key  # equal blocks share one key: their descendants then compare by identity
        block.key = key

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give blocks back tail first, so a shared prefix outlives its suffixes."""
        for block in reversed(blocks):
            assert block.ref_count > 0, f"block {block.block_id} freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block.block_id] = block
        self.num_frees += 1

    def clear_cache(self) -> None:
        """Forget what free blocks hold. Blocks in use stay findable."""
        for block in self._free.values():
            self._forget(block)

    def reset_peak(self) -> None:
        self.peak_blocks_in_use = self.num_blocks_in_use

    def check_integrity(self, held: Iterable[Sequence[KVCacheBlock]]) -> None:
        """Assert that `held`, the block tables of all holders, and the free list make up the pool exactly."""
        holders: Counter[int] = Counter()
        for table in held:
            ids = [block.block_id for block in table]
            assert len(set(ids)) == len(ids), f"a block twice in one table: {ids}"
            holders.update(ids)
        for block in self._blocks:
            count = holders[block.block_id]
            assert block.ref_count == count, f"{block}: {count} holders"
            assert (block.block_id in self._free) == (count == 0), f"{block}: {count} holders, free list disagrees"
            assert count <= 1 or block.key is not None, f"{block}: shared without a key"
        for block_hash, block in self._cached.items():
            assert block.key is not None, f"{block} is cached without a key"
            assert block.key.block_hash == block_hash, f"{block} is cached under another hash"

    def _take_oldest_free(self) -> KVCacheBlock:
        _, block = self._free.popitem(last=False)
        self._forget(block)
        block.ref_count = 1
        return block

    def _forget(self, block: KVCacheBlock) -> None:
        if block.key is not None and self._cached.get(block.key.block_hash) is block:
            del self._cached[block.key.block_hash]
        block.key = None

    def _note_peak(self) -> None:
        self.peak_blocks_in_use = max(self.peak_blocks_in_use, self.num_blocks_in_use)
