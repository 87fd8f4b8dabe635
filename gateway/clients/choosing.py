"""Address, key, model and limits to give to a client: what was said, else the settings', else what the gateway serves.

Pure, given the settings and the gateway's answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.clients.served import Served
from gateway.clients.target import DEFAULT_KEY, Limits, Target, limits_of
from gateway.core.types import CacheMode
from gateway.settings.base_url import normalise_base_url
from gateway.settings.errors import SettingsError
from gateway.settings.schema import Settings

DEFAULT_CONTEXT = 8192  # of the bundled model
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}
_MASK = "…"


@dataclass(frozen=True, slots=True)
class Said:
    """What the user asked for; None where nothing was said."""

    url: str | None = None
    key: str | None = None
    model: str | None = None
    mode: CacheMode | None = None
    max_output: int | None = None


def gateway_url(said: str | None, settings: Settings) -> str:
    """Without /v1 and without a mode: both are added where a client needs them. Raises SettingsError for a bad URL."""
    if said is None:
        host = settings.server.host
        if settings.server.port == 0:
            raise SettingsError("server.port is 0, any free port: give the gateway's address with --url")
        shown = _ANY_ADDRESS.get(host, f"[{host}]" if ":" in host else host)
        return f"http://{shown}:{settings.server.port}"
    url, _ = normalise_base_url(said, "--url")
    url = url.removesuffix("/v1")
    for mode in CacheMode:
        url = url.removesuffix(f"/{mode}")
    return url


def key_for(said: str | None, environ_key: str | None, settings: Settings, mode: CacheMode | None) -> str:
    """A key of the settings that stands for another mode is passed over."""
    if said or environ_key:
        return said or environ_key or ""
    fitting = [key for key in settings.keys if key.mode in {None, mode}] or list(settings.keys)
    return fitting[0].key.get_secret_value().strip() if fitting else DEFAULT_KEY


def target_for(said: Said, settings: Settings, *, url: str, key: str, served: Served) -> tuple[Target, list[str]]:
    """The target, and what must be said about it."""
    notes: list[str] = []
    model, is_bundled = _model(said, settings, served)
    known = served.models.get(model)
    if served.problem:
        notes.append(f"{served.problem}: the model is {_origin(said, settings)}")
        limits = _limits_without_gateway(said, settings, notes) if is_bundled else None
    else:
        limits = limits_of(known, said.max_output) if known else None
        if model not in served.models:
            shown = ", ".join(list(served.models)[:8]) or "none"
            notes.append(f"the gateway lists no model {model!r}; it lists: {shown}")
        elif limits is None:
            notes.append(f"the gateway doesn't know yet how much {model!r} holds; the client uses its own limits")
    return Target(url, key, model, said.mode, limits), notes


def _model(said: Said, settings: Settings, served: Served) -> tuple[str, bool]:
    """The name, and whether the bundled engine has it."""
    engine = settings.effective_engine()
    bundled = engine.public_name() if engine else None
    configured = settings.server.model or bundled
    if said.model is None and not served.problem and configured not in served.models:
        configured = served.first() or configured
    name = said.model or configured or "default"
    return name, name.removesuffix(":merged").removesuffix(":split") == bundled


def _origin(said: Said, settings: Settings) -> str:
    return "the one that was named" if said.model else "the settings'" if settings.server.model else "the bundled one"


def _limits_without_gateway(said: Said, settings: Settings, notes: list[str]) -> Limits:
    engine = settings.effective_engine()
    context = (engine.max_model_len if engine else None) or DEFAULT_CONTEXT
    notes.append(f"the model's limit is taken to be {context} tokens; with the gateway running it is asked")
    return limits_of(context, said.max_output)


def masked(text: str, key: str) -> str:
    """The text without the key, unless the key is the default one, which is no secret."""
    if key in {"", DEFAULT_KEY}:
        return text
    return text.replace(key, mask(key))


def mask(key: str) -> str:
    """Enough of it to tell two keys apart."""
    return f"{key[:3]}{_MASK}{key[-3:]}" if len(key) >= 12 else "***"
