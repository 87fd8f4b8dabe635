"""A target that litellm reaches: any provider, asked and answering in OpenAI's chat API.

To the service it is one more server of that API; what litellm makes of it, the modules next door know.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.core.errors import GatewayError, InvalidRequest, UpstreamTimeout
from gateway.core.types import ModelCard
from gateway.settings.schema import TargetSettings, TimeoutSettings
from gateway.upstreams.base import RawRequest
from gateway.upstreams.litellm_sdk.answer import StreamedAnswer, WholeAnswer
from gateway.upstreams.litellm_sdk.errors import gateway_error
from gateway.upstreams.litellm_sdk.library import Library
from gateway.upstreams.litellm_sdk.prices import Prices
from gateway.upstreams.litellm_sdk.redirects import PROVIDERS_THAT_FOLLOW
from gateway.upstreams.litellm_sdk.request import Provider, arguments

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 8
_OPENAI_LIKE = ("openai", "azure", "text-completion-openai", "openrouter")
_PROVIDER_EXAMPLE = "anthropic/claude-sonnet-4-5"


class LitellmUpstream:
    """One target. Its key goes to its provider and nowhere else."""

    kind = "litellm"
    dialects = ("openai_chat",)
    knows_models = True  # those that the settings list

    def __init__(
        self, target: TargetSettings, timeouts: TimeoutSettings, library: Library, prices: Prices | None = None
    ) -> None:
        self.name = target.name
        self.reachable: bool | None = None  # by the last request; None = none yet
        self.notices: tuple[str, ...] = ()
        self._listed = target.models
        self._options = _options(target)
        self._timeouts = timeouts
        self._library = library
        self._prices = prices
        self._secrets = _secrets(target)
        self._providers: dict[str, Provider] = {}

    async def open(self, request: RawRequest) -> WholeAnswer | StreamedAnswer:
        """Ask, and wait for the answer or the first chunk of its stream."""
        fields = msgspec.json.decode(request.body, type=dict[str, Any])
        try:
            library = await self._library.get()
            provider = await self._provider(library, str(fields.get("model") or ""))
            asked = arguments(fields, provider)
            answer = await self._ask(library, fields, asked.values, request.stream, asked.notices)
        except InvalidRequest:
            raise
        except GatewayError:
            self.reachable = False
            raise
        self.reachable = True
        return answer

    async def models(self) -> Sequence[ModelCard]:
        """The settings' list, with the context sizes of litellm's table."""
        sizes = self._prices
        return [
            ModelCard(
                id=name,
                target=self.name,
                owned_by=self.name,
                max_model_len=await sizes.max_model_len(name) if sizes is not None else None,
            )
            for name in self._listed
        ]

    async def _ask(
        self, library: Any, fields: Mapping[str, Any], values: dict[str, Any], stream: bool, notices: tuple[str, ...]
    ) -> WholeAnswer | StreamedAnswer:
        limit = self._timeouts.first_byte_seconds
        more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        try:
            async with asyncio.timeout(limit):
                said = await library.acompletion(
                    **values,
                    **self._options,
                    **more,
                    model=fields["model"],
                    stream=stream,
                    max_retries=0,  # the gateway itself sends again, or doesn't
                    num_retries=0,
                    timeout=max(limit, self._timeouts.idle_seconds) + 1,  # ours come first
                )
                if not stream or not hasattr(said, "__anext__"):
                    return WholeAnswer(said, self._secrets, notices)
                return await self._begun(said, notices)
        except TimeoutError:
            raise UpstreamTimeout(f"Upstream {self.name!r} gave no answer within {limit:g} s.") from None
        except GatewayError:
            raise
        except Exception as error:  # providers' code raises anything
            raise self._error(error) from None

    async def _begun(self, stream: Any, notices: tuple[str, ...]) -> StreamedAnswer:
        answer = StreamedAnswer(stream, self._timeouts.idle_seconds, self._secrets, self._error, notices)
        try:
            await answer.begin()
        except BaseException:
            await answer.close()
            raise
        return answer

    async def _provider(self, library: Any, model: str) -> Provider:
        if model not in self._providers:
            self._providers[model] = await asyncio.to_thread(self._look_up, library, model)
        return self._providers[model]

    def _look_up(self, library: Any, model: str) -> Provider:
        try:
            bare, name, _, _ = library.get_llm_provider(model=model, api_base=self._options.get("api_base"))
            supported = library.get_supported_openai_params(model=bare, custom_llm_provider=name)
        except Exception:  # it has an error of its own, whose words advise on code
            raise InvalidRequest(
                f"Target {self.name!r}: litellm knows no provider for model {model[:100]!r}. A model is named "
                f"PROVIDER/MODEL there, such as {_PROVIDER_EXAMPLE}.",
                param="model",
            ) from None
        if name in PROVIDERS_THAT_FOLLOW:
            raise InvalidRequest(
                f"Target {self.name!r}: provider {name} follows redirects, to where the key would go along, and is "
                "not used. Name the model openai/MODEL instead.",
                param="model",
            )
        like_openai = name in _OPENAI_LIKE or name in library.openai_compatible_providers
        return Provider(name, frozenset(supported) if supported else None, like_openai)

    def _error(self, error: BaseException) -> GatewayError:
        return gateway_error(error, self.name, self._secrets)


def _options(target: TargetSettings) -> dict[str, Any]:
    """What the settings say for every request."""
    found: dict[str, Any] = {name: value.get_secret_value() for name, value in target.params.items()}
    if target.api_key is not None:
        found["api_key"] = target.api_key.get_secret_value()
    if target.base_url is not None:
        found["api_base"] = target.base_url
    return found


def _secrets(target: TargetSettings) -> tuple[str, ...]:
    """What must not be in any word to a client: the target's key, and those that litellm takes from the environment."""
    found = [value.get_secret_value() for name, value in target.params.items() if _SECRET_NAME.search(name)]
    if target.api_key is not None:
        found.append(target.api_key.get_secret_value())
    found += [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    unlike_words = {secret for secret in found if len(secret) >= _SHORTEST_SECRET}
    return tuple(sorted(unlike_words, key=len, reverse=True))
