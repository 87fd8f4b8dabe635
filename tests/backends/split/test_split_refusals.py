"""Requests and peers that are refused, and what is said before anything else."""

import re

import msgspec
import pytest
from scripted_kv import prompt, reference
from split_doubles import SplitPair
from split_sides import make_info

from backends.core.errors import RequestRefused
from backends.engines.base import PeerId
from backends.protocol.messages import (
    Accepted,
    CacheParams,
    EngineInfo,
    Prefill,
    PrefillFailed,
    PrefillStarted,
    Released,
    SamplingParams,
)

PEER = PeerId("another", 99)


def test_a_request_is_accepted_before_anything_else_is_said(pair: SplitPair):
    pair.submit("a", prompt(9), 4)

    assert pair.emitted == [Accepted(request_id="a", prompt_tokens=9, max_tokens=4)]
    pair.run()


def test_a_full_queue_refuses():
    pair = SplitPair(decode_seqs=1, max_waiting=2)
    pair.connect()
    for request_id in "abc":
        pair.submit(request_id, prompt(5))
    with pytest.raises(RequestRefused, match="2 requests are waiting") as refused:
        pair.submit("d", prompt(5))
    assert refused.value.code == "queue_full"
    pair.run()
    assert pair.ends("d") == []
    pair.assert_idle()
    pair.close()


@pytest.mark.parametrize(("prefill_blocks", "decode_blocks"), [(32, 4), (4, 32)])
def test_a_prompt_that_fits_neither_pool_is_refused_at_once(prefill_blocks: int, decode_blocks: int):
    pair = SplitPair(prefill_blocks=prefill_blocks, decode_blocks=decode_blocks)
    pair.connect()
    with pytest.raises(RequestRefused, match="pool of 16 tokens") as refused:
        pair.submit("a", prompt(16))
    assert refused.value.code == "kv_pool_too_small"
    pair.submit("b", prompt(15), 2)
    pair.run()
    assert pair.tokens("b")[:1] == reference(prompt(15), 1, ignore_eos=True)
    pair.assert_idle()
    pair.close()


def test_one_request_id_is_one_request(pair: SplitPair):
    pair.submit("a", prompt(5))
    with pytest.raises(RequestRefused, match="in use"):
        pair.submit("a", prompt(5))
    pair.deliver()
    pair.decode.abort("a")
    with pytest.raises(RequestRefused, match="in use"):  # its blocks are still with the prefill side
        pair.submit("a", prompt(5))
    pair.run()
    pair.submit("a", prompt(5), 2)
    pair.run()
    assert pair.tokens("a") == reference(prompt(5), 2, ignore_eos=True)


@pytest.mark.parametrize("block_ids", [[0], [0, 0], [0, 32], [-1, 0]])
def test_block_ids_that_cannot_be_right_are_refused(pair: SplitPair, block_ids: list[int]):
    pair.prefill.peer_message(
        pair.peer,
        Prefill(
            request_id="a",
            token_ids=prompt(5),
            block_ids=block_ids,
            sampling=SamplingParams(),
            cache=CacheParams(),
            transfer_mode="layer",
            seed=1,
        ),
    )

    (answer,) = pair.from_prefill
    assert isinstance(answer, PrefillFailed)
    assert answer.code == "internal"
    assert pair.prefill.num_unfinished() == 0
    pair.from_prefill.clear()


def test_prefill_says_when_it_starts_and_that_it_let_go(pair: SplitPair):
    pair.submit("a", prompt(30))
    pair.deliver()
    assert pair.prefill.step()
    assert isinstance(pair.from_prefill[0], PrefillStarted)
    pair.from_prefill.clear()
    pair.submit("b", prompt(30))
    pair.deliver()
    pair.decode.abort("b")
    while pair.to_prefill:
        pair.prefill.peer_message(pair.peer, pair.to_prefill.popleft())

    assert Released(request_id="b") in pair.from_prefill
    pair.kill_prefill()
    pair.assert_idle()


DIFFERENT = [
    ({"model_fingerprint": "weights-2"}, r"differ in model: decode has 'weights-2', prefill has 'weights-1'"),
    ({"block_size": 8}, r"differ in block_size: decode has 8, prefill has 4"),
    ({"kv_cache_dtype": "bf16"}, r"differ in kv_cache_dtype: decode has 'bf16', prefill has 'fp32'"),
    ({"weight_dtype": "int8"}, r"differ in weight_dtype: decode has 'int8', prefill has 'fp32'"),
    ({"kv_bytes_per_token": 12}, r"differ in KV bytes per token: decode has 12, prefill has 48"),
    ({"num_blocks": 31}, r"announced \d+ bytes of KV memory; its 31 blocks of 4 tokens need 5952"),
]


def refusal_of(pair: SplitPair, **changes: object) -> str | None:
    message = msgspec.structs.replace(pair.decode.pair_message(), **changes)
    return pair.prefill.pair(PEER, message, pair.memory.fd, lambda _: None)


@pytest.mark.parametrize(("changes", "reason"), DIFFERENT)
def test_sides_that_differ_do_not_pair(pair: SplitPair, changes: dict[str, object], reason: str):
    pair.kill_prefill()
    info: EngineInfo = make_info("decode", **{"num_blocks": 32, **changes})  # type: ignore[arg-type]

    refusal = refusal_of(pair, info=info)

    assert refusal is not None
    assert re.search(reason, refusal)
    pair.connect()


def test_sides_of_different_versions_do_not_pair(pair: SplitPair):
    pair.kill_prefill()

    refusal = refusal_of(pair, protocol_version=99)

    assert refusal is not None
    assert re.search(r"differ in protocol version: decode has 99, prefill has \d+\.", refusal)


def test_kv_memory_that_cannot_be_mapped_is_refused(pair: SplitPair):
    pair.kill_prefill()

    with open("/dev/null", "rb") as nothing:
        refusal = pair.prefill.pair(PEER, pair.decode.pair_message(), nothing.fileno(), lambda _: None)

    assert refusal is not None
    assert "can't be mapped" in refusal
