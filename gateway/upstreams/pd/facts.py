"""Whether a prefill and a decode server belong together: what each says of itself, compared. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.settings.schema import PairEngine
from gateway.upstreams.pd.plans import DataRank

# `owned_by` of a server's model list -> the engine, as far as engines name themselves there.
_OWNERS = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}
_MADE_BY: Mapping[PairEngine, str] = {
    "vllm": "vLLM",
    "vllm-mooncake": "vLLM",
    "llm-d": "vLLM",
    "store": "vLLM",
    "sglang": "SGLang",
    "tensorrt-llm": "TensorRT-LLM",
}


# Names of a KV cache in the model's own 16 bits, which "auto" may stand for.
_AS_THE_MODEL = frozenset({"auto", "bf16", "bfloat16", "fp16", "float16", "half"})

Address = tuple[str, int, str]  # host, port and path; every name of this host is the same one


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What one server says of itself. None = it doesn't say."""

    addresses: frozenset[Address] = frozenset()  # that its URL leads to
    version: str | None = None
    owner: str | None = None  # of its models
    models: frozenset[str] = frozenset()
    birth: tuple[float, ...] = ()  # instants that only one process has
    mode: str | None = None  # SGLang: prefill, decode or null
    page_size: int | None = None
    kv_dtype: str | None = None
    bootstrap_port: int | None = None
    ranks: tuple[DataRank, ...] = ()


def mismatch(engine: PairEngine, prefill: ServerFacts, decode: ServerFacts) -> str | None:
    """Why these two are no pair, with both values; None if nothing speaks against it."""
    return next(_mismatches(engine, prefill, decode), None)


def _mismatches(engine: PairEngine, prefill: ServerFacts, decode: ServerFacts) -> Iterator[str]:
    if is_same(prefill, decode):
        yield "both are the same server, so there is no pair to split between; merged is the mode for a single server"
    for side, facts in (("prefill", prefill), ("decode", decode)):
        made_by = _OWNERS.get(facts.owner or "")
        if made_by is not None and made_by != _MADE_BY[engine]:
            yield f'the {side} server is {made_by}, and engine = "{engine}" is a protocol of {_MADE_BY[engine]}'
        if facts.mode is not None and facts.mode != side:
            yield f"the {side} server runs with disaggregation mode {facts.mode}, which must be {side}"
    compared = (
        ("version", prefill.version, decode.version),
        ("models", _listed(prefill.models), _listed(decode.models)),
        ("page size", prefill.page_size, decode.page_size),
    )
    for what, of_prefill, of_decode in compared:
        if of_prefill is not None and of_decode is not None and of_prefill != of_decode:
            yield _unequal(what, of_prefill, of_decode)
    if _differ_in_kv(engine, prefill.kv_dtype, decode.kv_dtype):
        yield _unequal("KV dtype", prefill.kv_dtype, decode.kv_dtype)


def _unequal(what: str, of_prefill: object, of_decode: object) -> str:
    return f"{what}: prefill has {of_prefill}, decode has {of_decode}; they must be equal"


def _differ_in_kv(engine: PairEngine, prefill: str | None, decode: str | None) -> bool:
    """vLLM compares the words of the two command lines; elsewhere "auto" may be what the other one is told."""
    if prefill is None or decode is None or prefill == decode:
        return False
    may_be_one = "auto" in (prefill, decode) and {prefill, decode} <= _AS_THE_MODEL
    return _MADE_BY[engine] == "vLLM" or not may_be_one


def is_same(one: ServerFacts, other: ServerFacts) -> bool:
    """One process. Their births decide if both are known: one address may lead to several, by their host names."""
    if one.birth and other.birth:
        return one.birth == other.birth
    if one.mode is not None and other.mode is not None and one.mode != other.mode:
        return False
    return bool(one.addresses & other.addresses)


def _listed(models: frozenset[str]) -> str | None:
    return ", ".join(sorted(models)) or None


def sglang_facts(info: Any) -> dict[str, Any]:
    """Of GET /server_info."""
    if not isinstance(info, dict):
        return {}
    page, port, dtype = (info.get(n) for n in ("page_size", "disaggregation_bootstrap_port", "kv_cache_dtype"))
    found = {
        "version": _text(info.get("version")),
        "mode": _text(info.get("disaggregation_mode")),
        "page_size": page if isinstance(page, int) else None,
        "kv_dtype": _text(dtype),
        "bootstrap_port": port if isinstance(port, int) and 0 < port < 65536 else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def model_facts(listed: Any) -> dict[str, Any]:
    """Of GET /v1/models."""
    entries = listed.get("data") if isinstance(listed, dict) else None
    listing = entries if isinstance(entries, list) else []
    cards = [entry for entry in listing if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    owners = {owner for card in cards if (owner := _text(card.get("owned_by"))) is not None}
    return {"models": frozenset(card["id"] for card in cards), "owner": min(owners) if len(owners) == 1 else None}


def mooncake_ranks(said: Any) -> tuple[DataRank, ...]:
    """Of GET /query at a prefill server's bootstrap port: rank -> engine id and address."""
    entries = said.items() if isinstance(said, dict) else ()
    return tuple(
        DataRank(str(rank), str(entry["engine_id"]))
        for rank, entry in entries
        if isinstance(entry, dict) and entry.get("engine_id")
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
