"""Every client by its name."""

from __future__ import annotations

from gateway.clients import cc_switch, claude, cline, codex, continue_dev, curl, gemini, opencode
from gateway.clients.client import Client, Spoken

FILE_CLIENTS: dict[str, Client] = {
    client.name: client
    for client in (
        cline.CLIENT,
        claude.CLIENT,
        codex.CLIENT,
        opencode.CLIENT,
        continue_dev.CLIENT,
        gemini.CLIENT,
    )
}
SPOKEN_CLIENTS: dict[str, Spoken] = {client.name: client for client in (cc_switch.CLIENT, curl.CLIENT)}
NAMES = (*FILE_CLIENTS, *SPOKEN_CLIENTS)
