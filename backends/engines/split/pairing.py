"""Whether a prefill side may write into a decode side's KV memory: every difference that would corrupt it, by name."""

from __future__ import annotations

from backends.protocol.messages import PROTOCOL_VERSION, EngineInfo, Pair

# What must be equal, and what it is called to a user.
MUST_MATCH = {
    "model_fingerprint": "model",
    "weight_dtype": "weight_dtype",
    "block_size": "block_size",
    "kv_cache_dtype": "kv_cache_dtype",
    "kv_bytes_per_token": "KV bytes per token",
    "vocab_size": "vocab_size",
}


def pairing_refusal(
    pair: Pair, prefill: EngineInfo, *, transfer_backend: str, protocol_version: int = PROTOCOL_VERSION
) -> str | None:
    """Why the decode side that introduces itself and the prefill side can't work together, or None."""
    decode = pair.info
    if pair.protocol_version != protocol_version:
        return _differs("protocol version", pair.protocol_version, protocol_version)
    if pair.transfer_backend != transfer_backend:
        return _differs("transfer_backend", pair.transfer_backend, transfer_backend)
    for field, name in MUST_MATCH.items():
        there, here = getattr(decode, field), getattr(prefill, field)
        if there != here:
            return _differs(name, there, here)
    expected = decode.num_blocks * decode.block_size * decode.kv_bytes_per_token
    if pair.kv_memory_bytes != expected:
        return (
            f"The decode instance announced {pair.kv_memory_bytes} bytes of KV memory; its {decode.num_blocks} blocks "
            f"of {decode.block_size} tokens need {expected}."
        )
    return None


def _differs(name: str, decode: object, prefill: object) -> str:
    return f"The two instances differ in {name}: decode has {decode!r}, prefill has {prefill!r}. Start both alike."
