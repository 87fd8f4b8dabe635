"""Where a client is to be pointed: the gateway's address, key, model and limits, and the cache mode. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.types import CacheMode

MODE_HEADER = "X-Cache-Mode"
DEFAULT_KEY = "local"  # clients insist on some key; the gateway takes any until keys are configured
ENTRY_NAME = "kvgate"  # of what is ours in a client's settings

# The first request of an agent on a slow machine: minutes may pass before anything but heartbeats comes.
TIMEOUT_MILLISECONDS = 600_000
MAX_OUTPUT = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """In tokens: what the model holds, and the longest answer to ask for."""

    context: int
    output: int


def limits_of(context: int, max_output: int | None = None) -> Limits:
    """A quarter of the context for the answer, unless another length was named."""
    return Limits(context, max_output or max(1, min(MAX_OUTPUT, context // 4)))


@dataclass(frozen=True, slots=True)
class Target:
    url: str  # the gateway without /v1, such as http://127.0.0.1:8000
    key: str
    model: str
    mode: CacheMode | None = None  # None: the gateway's own default
    limits: Limits | None = None  # None: not known

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def path_url(self) -> str:
        """The address that carries the mode by itself."""
        return f"{self.url}/{self.mode}" if self.mode else self.url
