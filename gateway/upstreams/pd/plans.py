"""What each protocol family sends to its two servers. Pure; `pd_legs` sends it.

Two families: sequential, where the prefill server's answer says where its KV is, and concurrent, where both servers
get the same rendezvous key at once. llm-d is neither: its decode side calls the prefill server itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from gateway.core.errors import InvalidRequest, UpstreamError
from gateway.upstreams.pd.bodies import (
    Fields,
    Leg,
    asks_one_token,
    batch_size,
    prefill_fields,
    refuse_prompt_logprobs,
    refuse_several_answers,
    value,
)

DEFAULT_BOOTSTRAP_PORT = 8998


@dataclass(frozen=True, slots=True)
class DataRank:
    """One data-parallel rank of a Mooncake prefill server, as its bootstrap service tells it."""

    rank: str
    engine_id: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at one pair of servers. Every id is new in each try."""

    request_id: str  # X-Request-Id, the same for both servers
    rid: str  # of one length for all requests: SGLang aborts every request whose id begins with the one it is given
    room: int  # [0, 2**63)
    prefill_host: str
    prefill_port: int
    bootstrap_port: int | None = None
    ranks: tuple[DataRank, ...] = ()
    is_chat: bool = True

    @property
    def bootstrap_address(self) -> str:
        return f"http://{url_host(self.prefill_host)}:{self.bootstrap_port or DEFAULT_BOOTSTRAP_PORT}"


def url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class Plan(Protocol):
    """Common to all families."""

    def check(self, fields: Fields) -> None:
        """Raises InvalidRequest for what two servers can't do."""


class SequentialPlan(Plan, Protocol):
    """First the prefill server, then the decode server with what the first one said."""

    def prefill(self, fields: Fields, attempt: Attempt) -> Leg: ...

    def decode(self, fields: Fields, attempt: Attempt, answer: Fields) -> Leg | None:
        """None: the prefill's answer is the whole one."""

    def needs_no_decode(self, fields: Fields) -> bool:
        """The prefill server alone answers the request as it is."""


class ConcurrentPlan(Plan, Protocol):
    """Both servers at once. A failure at one leaves the other waiting: whoever runs this must cancel it."""

    abort_path: str | None

    def prefill(self, fields: Fields, attempt: Attempt) -> Leg: ...

    def decode(self, fields: Fields, attempt: Attempt) -> Leg: ...


# ---------------------------------------------------------------------------------------------------------- sequential


class VllmPull:
    """vLLM's NixlConnector: the decode server pulls KV from where the prefill server's answer says.

    That answer's dict is opaque: its content has changed with most versions.
    """

    _ASK = (
        ("do_remote_decode", True),
        ("do_remote_prefill", False),
        ("remote_engine_id", None),
        ("remote_block_ids", None),
        ("remote_host", None),
        ("remote_port", None),
    )

    def check(self, fields: Fields) -> None:
        refuse_several_answers(fields, "vllm")
        refuse_prompt_logprobs(fields, "vllm")

    def needs_no_decode(self, fields: Fields) -> bool:
        return asks_one_token(fields)

    def prefill(self, fields: Fields, attempt: Attempt) -> Leg:
        return Leg(prefill_fields(fields) | {"kv_transfer_params": dict(self._ASK)}, stream=False)

    def decode(self, fields: Fields, attempt: Attempt, answer: Fields) -> Leg | None:
        params = value(answer, "kv_transfer_params")
        if not isinstance(params, dict) or not params:
            raise UpstreamError(
                "The prefill server gave no kv_transfer_params: it runs without --kv-transfer-config, or with a "
                'connector that needs none (engine = "store").',
                status=502,
            )
        if params.get("do_remote_prefill") is False:  # the decode server would silently compute the prompt again
            raise UpstreamError(
                "The prefill server's kv_transfer_params say that there is no KV to fetch (do_remote_prefill: false).",
                status=502,
            )
        as_said = {"kv_transfer_params": answer["kv_transfer_params"]}
        return Leg({**fields, **as_said}, stream=value(fields, "stream") is True)


class Store:
    """Connectors that keep KV where both servers find it by the prompt's hash: LMCache, shared storage, offloading."""

    def check(self, fields: Fields) -> None:
        """Nothing: the decode server gets a plain request, and what it doesn't find it computes."""

    def needs_no_decode(self, fields: Fields) -> bool:
        return asks_one_token(fields) and value(fields, "n") in (None, 1)

    def prefill(self, fields: Fields, attempt: Attempt) -> Leg:
        return Leg(prefill_fields(fields), stream=False)

    def decode(self, fields: Fields, attempt: Attempt, answer: Fields) -> Leg | None:
        return Leg(fields, stream=value(fields, "stream") is True)


class TensorRT:
    """TensorRT-LLM, context first. The context server's token is kept, and may already end the answer."""

    def check(self, fields: Fields) -> None:
        refuse_several_answers(fields, "tensorrt-llm")
        refuse_prompt_logprobs(fields, "tensorrt-llm")

    def needs_no_decode(self, fields: Fields) -> bool:
        return False

    def prefill(self, fields: Fields, attempt: Attempt) -> Leg:
        kept = {name: found for name, found in fields.items() if name != "stream_options"}
        params = {"request_type": "context_only", "disagg_request_id": attempt.room}
        return Leg(kept | {"stream": False, "disaggregated_params": params}, stream=False)

    def decode(self, fields: Fields, attempt: Attempt, answer: Fields) -> Leg | None:
        choices = value(answer, "choices")
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        if not isinstance(choice, dict):
            raise UpstreamError("The context server's answer has no single choice.", status=502)
        if choice.get("finish_reason") not in ("length", "not_finished"):
            return None
        params, token_ids = choice.get("disaggregated_params"), answer.get("prompt_token_ids")
        if not isinstance(params, dict) or token_ids is None:
            raise UpstreamError(
                "The context server's answer has no disaggregated_params or no prompt_token_ids.", status=502
            )
        prompt: Fields = {"prompt_token_ids" if attempt.is_chat else "prompt": token_ids}
        params = {**params, "request_type": "generation_only"}
        return Leg({**fields, **prompt, "disaggregated_params": params}, stream=value(fields, "stream") is True)


# ---------------------------------------------------------------------------------------------------------- concurrent


class Sglang:
    """SGLang: one body for both, with a room in which the two meet. The prefill server stops by itself."""

    abort_path: str | None = "/abort_request"

    def check(self, fields: Fields) -> None:
        refuse_several_answers(fields, "sglang", batches=True)
        refuse_prompt_logprobs(fields, "sglang")

    def prefill(self, fields: Fields, attempt: Attempt) -> Leg:
        return self._leg(fields, attempt)

    def decode(self, fields: Fields, attempt: Attempt) -> Leg:
        return self._leg(fields, attempt)

    def _leg(self, fields: Fields, attempt: Attempt) -> Leg:
        size = batch_size(fields)
        # SGLang puts `host:port` together itself, so that an IPv6 address needs its brackets.
        host, port = url_host(attempt.prefill_host), attempt.bootstrap_port or DEFAULT_BOOTSTRAP_PORT
        place: dict[str, Any]
        if size is None:
            place = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": attempt.room}
            place["rid"] = attempt.rid
        else:
            rooms = [(attempt.room + i) % 2**63 for i in range(size)]
            place = {"bootstrap_host": [host] * size, "bootstrap_port": [port] * size}
            place |= {"bootstrap_room": rooms, "rid": [f"{attempt.rid}{i:04d}" for i in range(size)]}
        return Leg({**fields, **place}, stream=value(fields, "stream") is True)


class VllmMooncake:
    """vLLM's MooncakeConnector: the prefill server's coordinates are known beforehand, from its bootstrap service."""

    abort_path: str | None = None

    def check(self, fields: Fields) -> None:
        refuse_several_answers(fields, "vllm-mooncake")
        refuse_prompt_logprobs(fields, "vllm-mooncake")

    def prefill(self, fields: Fields, attempt: Attempt) -> Leg:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": self._transfer_id(attempt)}
        headers = {"X-data-parallel-rank": self._rank(attempt).rank}
        return Leg(prefill_fields(fields) | {"kv_transfer_params": params}, stream=False, own_headers=headers)

    def decode(self, fields: Fields, attempt: Attempt) -> Leg:
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": attempt.bootstrap_address,
            "remote_engine_id": self._rank(attempt).engine_id,
            "transfer_id": self._transfer_id(attempt),
        }
        return Leg({**fields, "kv_transfer_params": params}, stream=value(fields, "stream") is True)

    def _rank(self, attempt: Attempt) -> DataRank:
        """The ranks in turn, by chance."""
        if not attempt.ranks:
            raise UpstreamError(
                f"The bootstrap service of the prefill server at {attempt.bootstrap_address} tells no engine.",
                status=502,
            )
        return attempt.ranks[attempt.room % len(attempt.ranks)]

    def _transfer_id(self, attempt: Attempt) -> str:
        return f"xfer-{attempt.rid}"


# -------------------------------------------------------------------------------------------------------------- header


class LlmD:
    """llm-d: the sidecar at the decode server is told by a header which prefill server to use."""

    HEADER = "x-prefiller-host-port"

    def check(self, fields: Fields) -> None:
        refuse_several_answers(fields, "llm-d")
        refuse_prompt_logprobs(fields, "llm-d")

    def decode(self, fields: Fields, attempt: Attempt) -> Leg:
        place = f"{url_host(attempt.prefill_host)}:{attempt.prefill_port}"
        return Leg(fields, stream=value(fields, "stream") is True, own_headers={self.HEADER: place})


AnyPlan = VllmPull | Store | TensorRT | Sglang | VllmMooncake | LlmD
PLANS: dict[str, type[AnyPlan]] = {
    "vllm": VllmPull,
    "vllm-mooncake": VllmMooncake,
    "sglang": Sglang,
    "llm-d": LlmD,
    "tensorrt-llm": TensorRT,
    "store": Store,
}
_RESERVED = (
    "kv_transfer_params",
    "disaggregated_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disagg_prefill_dp_rank",
)


def refuse_transfer_fields(fields: Fields, engine: str) -> None:
    """They say from which address a server fetches KV: that is not a client's to choose.

    Nor is SGLang's `rid`: it aborts every request whose id begins with the one that it is told.
    """
    for name in (*_RESERVED, "rid") if engine == "sglang" else _RESERVED:
        if name in fields and value(fields, name) is not None:
            raise _not_a_clients(name)
    extra = value(fields, "vllm_xargs") if "vllm_xargs" in fields else None
    if isinstance(extra, dict) and "kv_transfer_params" in extra:  # vLLM puts both into one table
        raise _not_a_clients("vllm_xargs.kv_transfer_params")


def _not_a_clients(name: str) -> InvalidRequest:
    return InvalidRequest(f"`{name}` is set by the gateway and can't be sent to this target.", param=name)
