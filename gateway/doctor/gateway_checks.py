"""Checks of a running gateway by what it says of itself. Pure: decoded answers in, findings out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gateway.clients.connection import table_of
from gateway.doctor.answer import Answer
from gateway.doctor.finding import Finding, ok, problem, warning

_FEW_TOKENS = 4096  # below that a rate says nothing
_LOW_HIT_RATE = 0.1


def check_reachable(health: Answer, url: str) -> Iterator[Finding]:
    body = health.json()
    if health.failure and not health.status:
        yield problem(
            f"nothing answers at {url}: {health.failure}", "", "start it with: kvgate serve; or give its --url"
        )
    elif not isinstance(body, Mapping) or body.get("name") != "kvgate":
        yield problem(
            f"what answers at {url} is no kvgate gateway (/health: HTTP {health.status})",
            "another program has this port",
            "give the right --url, or serve on another --port",
        )
    else:
        yield ok(f"the gateway answers at {url}: kvgate {body.get('version', '')}".rstrip())


def check_ready(ready: Answer) -> Iterator[Finding]:
    """That requests which choose nothing are served, and what each mode is."""
    body = table_of(ready.json())
    mode = body.get("default_mode", "")
    if ready.status == 200 and body.get("ready"):
        modes = ", ".join(f"{name} ({how})" for name, how in table_of(body.get("modes")).items())
        yield ok(f"ready; default mode {mode}; modes: {modes or 'the upstream decides'}")
    else:
        yield problem(
            f"not ready: the default mode {mode} is not served yet (HTTP {ready.status})",
            "what serves it is starting, is down or has failed",
            "wait some seconds; if it stays so, the gateway's log says why",
        )
    for name, target in table_of(body.get("targets")).items():
        yield from _check_target(name, table_of(target))


def _check_target(name: str, target: Mapping[str, Any]) -> Iterator[Finding]:
    if target.get("reachable") is False and not target.get("servers"):  # of those each is told below
        yield problem(
            f"the upstream {name} can't be reached",
            "its address, or the network",
            "check api_base or base_url of it; kvgate config show lists them",
        )
    for instance in _rows(target.get("instances")):
        state = instance.get("state", "")
        if state not in {"ready", "starting"}:
            yield problem(
                f"the instance {instance.get('name', '?')} is {state}", str(instance.get("reason", "")), "see the log"
            )
    devices = {str(row.get("name")): table_of(row.get("info")).get("device") for row in _rows(target.get("instances"))}
    yield from check_servers(_rows(target.get("servers")))
    yield from check_pairs(_rows(target.get("pairs")), devices)


def check_servers(servers: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Of `[[pairs]]`: which are down, and which are not used although they are up."""
    for server in servers:
        place = f"{server.get('name')} at {server.get('url')}"
        if server.get("state") == "down":
            yield problem(f"{place} is down", "GET /health does not answer 200", "start it, or check its address")
        if server.get("problem"):
            yield problem(f"{place} is not used", str(server["problem"]), "correct [[pairs]]")


def check_pairs(pairs: Iterable[Mapping[str, Any]], devices: Mapping[str, Any]) -> Iterator[Finding]:
    for pair in pairs:
        names = f"{pair.get('prefill')} and {pair.get('decode')}"
        if pair.get("problem"):
            yield problem(
                f"split: {names} are no pair",
                str(pair["problem"]),
                "start both alike: the same engine, version, model and KV settings",
            )
        if pair.get("connected") is False:
            why = str(pair.get("reason", ""))
            yield problem(f"split: {names} are not connected", why, "wait some seconds, then see the log")
        if pair.get("same_device") and devices.get(str(pair.get("decode"))) == "cpu":
            yield ok(
                f"split: {names} share this machine's CPU: running answers stay steady, TTFT and memory don't fall"
            )
        elif pair.get("same_device"):
            yield warning(
                f"split: {names} are on one device",
                "memory of that device does not fall in split; it rises, since both sides are there",
                "give prefill_gpus and decode_gpus different devices, or use merged",
            )


def check_notices(notices: Iterable[str], source: str) -> Iterator[Finding]:
    """What settings have no effect, or not the one that was hoped for: the gateway found that at its start."""
    for notice in notices:
        yield warning(f"{source}: {notice}")


def check_models(models: Answer) -> Iterator[Finding]:
    rows = _rows(table_of(models.json()).get("data"))
    if models.status == 401:
        yield problem("the key is not one of the gateway's", "", "give it with --key or KVGATE_KEY")
    elif not rows:
        why = "no target says what it serves" if models.status == 200 else models.error()[0]
        yield problem("no model is listed", why, "see the gateway's log, and the upstream's key")
    else:
        yield ok(f"models: {', '.join(sorted({str(row['id']).partition(':')[0] for row in rows if 'id' in row})[:8])}")


def check_engines(engines: Answer) -> Iterator[Finding]:
    """What the engines have counted since they started."""
    figures = table_of(table_of(engines.json()).get("engines"))
    for name, one in figures.items():
        yield from _check_engine(name, table_of(one))


def _check_engine(name: str, figures: Mapping[str, Any]) -> Iterator[Finding]:
    preemptions = figures.get("num_preemptions") or 0
    if preemptions:
        yield warning(
            f"{name} has preempted requests {preemptions} times",
            "its KV pool is too small for what runs at once; each preempted request is computed again",
            "raise kv_cache_gib or decode_kv_limit_gb in [kv_cache], or lower merged_max_batch or decode_max_batch",
        )
    asked, hit = figures.get("prefix_query_tokens") or 0, figures.get("prefix_hit_tokens") or 0
    if asked >= _FEW_TOKENS and hit < asked * _LOW_HIT_RATE:
        yield warning(
            f"{name} found {100 * hit / asked:.0f} % of {asked} prompt tokens in its prefix cache",
            "prompts differ early, or something in the system prompt changes with every request",
            "put what changes at the end of the prompt; a shared prefix counts in whole blocks of block_size tokens",
        )


def _rows(value: object) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []
