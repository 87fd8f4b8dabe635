"""curl: a command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from gateway.clients.client import Spoken
from gateway.clients.target import DEFAULT_KEY, MODE_HEADER, Target

KEY_VARIABLE = "KVGATE_KEY"


def body_of(target: Target) -> str:
    message = {"role": "user", "content": "What is a KV cache?"}
    body = {"model": target.model, "stream": True, "max_tokens": 64, "messages": [message]}
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False)


def lines(target: Target, show_key: bool) -> Sequence[tuple[str, str]]:
    shown = show_key or target.key == DEFAULT_KEY
    key = shlex.quote(f"Authorization: Bearer {target.key}") if shown else f'"Authorization: Bearer ${KEY_VARIABLE}"'
    mode = f" -H '{MODE_HEADER}: {target.mode}'" if target.mode else ""
    command = (
        f"curl -N {shlex.quote(target.openai_url + '/chat/completions')} -H {key}{mode} \\\n"
        f"  -H 'Content-Type: application/json' -d {shlex.quote(body_of(target))}"
    )
    title = "streams one answer" if shown else f"streams one answer; the key is in the environment as {KEY_VARIABLE}"
    return ((title, command),)


CLIENT = Spoken("curl", "curl", lines, "curl has no settings file for this: run the command that is printed")
