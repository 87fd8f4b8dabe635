"""CC Switch: one-click import links (`ccswitch://`), one for each program it drives.

Its settings are a database of its own; the link is the way in. Only Claude's environment survives the import whole, so
for the others the address carries the mode.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from urllib.parse import quote, urlencode

from gateway.clients.claude import HEADERS, variables
from gateway.clients.client import Spoken
from gateway.clients.target import DEFAULT_KEY, MODE_HEADER, Target

PLACEHOLDER = "YOUR-KEY"


def lines(target: Target, show_key: bool) -> Sequence[tuple[str, str]]:
    key = target.key if show_key or target.key == DEFAULT_KEY else PLACEHOLDER
    remark = "" if key != PLACEHOLDER else f"; the key is left out ({PLACEHOLDER}): enter it in CC Switch"
    apps = (("claude", "Claude Code"), ("codex", "Codex"), ("opencode", "OpenCode"), ("gemini", "Gemini CLI"))
    return [(f"{title}{remark}", link(target, app, key)) for app, title in apps]


def link(target: Target, app: str, key: str) -> str:
    name = f"kvgate ({target.mode})" if target.mode else "kvgate"
    # CC Switch adds nothing to the address of these two, and /v1beta is Gemini CLI's own.
    endpoint = target.url if app == "claude" else target.path_url + ("/v1" if app in {"codex", "opencode"} else "")
    fields = {
        "resource": "provider",
        "app": app,
        "name": name,
        "endpoint": endpoint,
        "apiKey": key,
        "model": target.model,
    }
    if app == "claude":
        fields |= {
            "haikuModel": target.model,
            "sonnetModel": target.model,
            "opusModel": target.model,
            "config": _config(target, key),
            "configFormat": "json",
        }
    return "ccswitch://v1/import?" + urlencode(fields, quote_via=quote, safe="")


def _config(target: Target, key: str) -> str:
    env = variables(target) | {"ANTHROPIC_AUTH_TOKEN": key}
    if target.mode:
        env[HEADERS] = f"{MODE_HEADER}: {target.mode}"
    return base64.urlsafe_b64encode(json.dumps({"env": env}).encode()).decode()


CLIENT = Spoken(
    "cc-switch",
    "CC Switch",
    lines,
    "CC Switch keeps its settings in a database: open the link that is printed, and confirm the import there",
)
