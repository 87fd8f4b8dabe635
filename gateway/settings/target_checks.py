"""What the options of a target mean together: which kind needs an address, which options act on it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gateway.settings.entries import Draft, Path
from gateway.settings.schema import Settings, TargetSettings

# What the gateway itself says to litellm, or never says at all.
_RESERVED = frozenset({
    "model", "messages", "stream", "stream_options", "api_key", "api_base", "base_url", "timeout", "num_retries",
    "max_retries", "extra_body", "drop_params", "mock_response", "fallbacks", "model_list", "callbacks", "caching",
})  # fmt: skip
_OPENAI_ONLY = ("forward_client_key", "dialects")


_PATH = re.compile(r"/[!-~]{0,500}")


def target_refusals(settings: Settings, draft: Draft) -> Iterator[str]:
    yield from _health_paths(settings, draft)
    yield from _silent(settings, draft)
    for i, target in enumerate(settings.targets):
        if target.kind == "openai" and target.base_url is None:
            yield f"{draft.origin_of(('targets', i, 'base_url'))}: is missing"
        if target.kind == "openai" and target.params:
            place = draft.origin_of(("targets", i, "params"))
            yield f'{place}: are arguments of litellm; set kind = "litellm", or remove them'
        if target.kind == "litellm" and target.health_path is not None:
            place = draft.origin_of(("targets", i, "health_path"))
            yield f"{place}: a target of litellm has no address to ask; remove it"
        for name in sorted(_RESERVED & set(target.params)):
            place = draft.origin_of(("targets", i, "params"))
            yield f"{place}: {name} can't be one of them; {_instead(name)}"


def _health_paths(settings: Settings, draft: Draft) -> Iterator[str]:
    paths: list[tuple[Path, str | None]] = [(("server", "api_health_path"), settings.server.api_health_path)]
    paths += [(("targets", i, "health_path"), target.health_path) for i, target in enumerate(settings.targets)]
    for option, path in paths:
        if path is not None and not _PATH.fullmatch(path):
            yield f"{draft.origin_of(option)}: must be a path on the target's own host, such as /health or /v1/models"


def _silent(settings: Settings, draft: Draft) -> Iterator[str]:
    spoken: list[tuple[Path, Sequence[str]]] = [(("server", "api_dialects"), settings.server.api_dialects)]
    spoken += [(("targets", i, "dialects"), target.dialects) for i, target in enumerate(settings.targets)]
    for option, dialects in spoken:
        if not dialects:
            yield f"{draft.origin_of(option)}: is empty, so that nothing could be asked; leave it out for the usual two"


def _instead(name: str) -> str:
    own = {"api_key": "use api_key", "api_base": "use base_url", "timeout": "use [timeouts]", "model": "use models"}
    return own.get(name, "the gateway says it, or leaves it out")


def target_advice(settings: Settings, draft: Draft) -> Iterator[str]:
    for i, target in enumerate(settings.targets):
        if "health_seconds" in target.model_fields_set and target.health_path is None:
            yield f"{draft.origin_of(('targets', i, 'health_seconds'))}: no effect, since health_path is not set"
        if target.kind == "litellm":
            yield from _litellm_advice(settings, draft, i, target)


def _litellm_advice(settings: Settings, draft: Draft, i: int, target: TargetSettings) -> Iterator[str]:
    place = draft.origin_of(("targets", i, "kind"))
    given = [name for name in _OPENAI_ONLY if name in target.model_fields_set]
    if given:
        yield f"{place}: {', '.join(given)} no effect on a target of litellm: it is asked in OpenAI's chat API"
    if not target.models and not any(route.target == target.name for route in settings.routes):
        yield (
            f"{place}: no model leads to {target.name!r}. List them in models, such as "
            '["anthropic/claude-sonnet-4-5"], or add [[routes]]'
        )
