"""A paired decode side as its prefill side sees it: where to answer, how to copy, what is being done for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from backends.core.errors import RequestRefused
from backends.engines.base import EmitPeer
from backends.engines.split.peer import PeerId
from backends.engines.split.prefill_work import PrefillWork
from backends.kv_transfer.pool import TransferPool
from backends.protocol.messages import EngineInfo, Prefill


@dataclass(slots=True, eq=False)
class DecodeSide:
    """One of them. Request ids are unique on it, not among several."""

    peer: PeerId
    info: EngineInfo
    emit: EmitPeer
    pool: TransferPool
    work: dict[str, PrefillWork] = field(default_factory=dict)

    def check(self, message: Prefill) -> None:
        """Refuse what can't be right: a wrong block id would overwrite another request's KV."""
        if message.request_id in self.work:
            raise RequestRefused("internal", f"Request id {message.request_id!r} is being prefilled already.")
        check_blocks(message, block_size=self.info.block_size, num_peer_blocks=self.info.num_blocks)
        check_writable(message, self.work.values(), block_size=self.info.block_size)


def check_blocks(message: Prefill, *, block_size: int, num_peer_blocks: int) -> None:
    """Enough blocks, each of them there, none twice; and what is held already ends with a block, within the prompt."""
    num_tokens, num_held = len(message.token_ids), message.num_held_tokens
    num_needed = -(-num_tokens // block_size)
    known = all(0 <= block_id < num_peer_blocks for block_id in message.block_ids)
    if not message.token_ids or not known or not len(set(message.block_ids)) == len(message.block_ids) >= num_needed:
        raise RequestRefused(
            "internal",
            f"A prompt of {num_tokens} tokens needs {num_needed} different blocks below {num_peer_blocks}; "
            f"the decode instance named {message.block_ids}.",
        )
    if not 0 <= num_held <= num_tokens or num_held % block_size:
        raise RequestRefused(
            "internal",
            f"The decode instance says that it holds {num_held} tokens of a prompt of {num_tokens}; it can only hold "
            f"whole blocks of {block_size}.",
        )


def check_writable(message: Prefill, others: Iterable[PrefillWork], *, block_size: int) -> None:
    """Blocks that are to be written must be nobody else's; those that are held may be shared."""
    writable = set(message.block_ids[message.num_held_tokens // block_size :])
    for work in others:
        if common := writable.intersection(work.transfer.target_block_ids):
            raise RequestRefused(
                "internal",
                f"The decode instance named blocks {sorted(common)} to be written that request "
                f"{work.request.request_id!r} has.",
            )
