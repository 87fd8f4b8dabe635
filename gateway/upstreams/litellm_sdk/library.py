"""litellm, imported when first needed: in a thread, kept to the price table it ships, and without a word in the log.

Its import takes seconds and asks the internet by default; its loggers print requests, which hold keys and prompts.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from gateway.core.errors import UpstreamUnreachable
from gateway.upstreams.litellm_sdk.redirects import follow_none

PIP_COMMAND = "pip install 'kvgate[litellm]'"
_LOGGERS = ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy", "litellm", "httpx", "httpcore", "openai", "boto3", "botocore")
_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # the shipped table, not one from the internet
    "LITELLM_MODE": "PRODUCTION",  # reads no .env of the folder it happens to be started in
}
_SWITCHES: dict[str, Any] = {
    "suppress_debug_info": True,
    "set_verbose": False,
    "telemetry": False,
    "drop_params": False,  # what a provider doesn't take is said, never dropped in silence
    "modify_params": False,
    "turn_off_message_logging": True,
    "redact_messages_in_exceptions": True,
    "disable_streaming_logging": True,
    "num_retries": 0,
    "user_url_validation": True,  # images that it fetches come from no private address
    "disable_hf_tokenizer_download": True,
    "disable_token_counter": True,  # counts that a provider doesn't tell are not known, and not made up
    "cache": None,
}
_CALLBACKS = ("callbacks", "input_callback", "success_callback", "failure_callback", "service_callback")


def is_installed() -> bool:
    """Found without importing it."""
    return find_spec("litellm") is not None


def import_quietly() -> Any:
    """Slow; call it in a thread."""
    os.environ.update(_ENVIRONMENT)
    follow_none(importlib.import_module("httpx"))
    library = importlib.import_module("litellm")
    for name, value in _SWITCHES.items():
        setattr(library, name, value)
    for name in _CALLBACKS:
        setattr(library, name, [])
    for name in _LOGGERS:
        silence(logging.getLogger(name))
    return library


def silence(logger: logging.Logger) -> None:
    """Its own handlers write past the one that blots out secrets."""
    logger.handlers[:] = [logging.NullHandler()]
    logger.setLevel(logging.CRITICAL + 1)
    logger.propagate = False


class Library:
    """One for all targets. `load` is exchanged in tests."""

    def __init__(self, load: Callable[[], Any] = import_quietly) -> None:
        self._load = load
        self._lock = asyncio.Lock()
        self._module: Any = None

    async def get(self) -> Any:
        """The module. Raises UpstreamUnreachable if the package isn't there."""
        if self._module is None:
            async with self._lock:
                self._module = self._module or await asyncio.to_thread(self._try_load)
        return self._module

    def _try_load(self) -> Any:
        try:
            return self._load()
        except ImportError as error:
            what = "is not installed" if not is_installed() else f"can't be imported ({error.name})"
            raise UpstreamUnreachable(
                f"This target needs the package litellm, which {what}: {PIP_COMMAND}", for_good=True
            ) from None
