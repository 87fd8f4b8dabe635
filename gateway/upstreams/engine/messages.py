"""Between the gateway's words and an engine's: a request into a `Generate`, answers into events. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backends.protocol.messages import Accepted, CacheParams, Done, Failed, Generate, TokenChunk
from gateway.core.errors import (
    ContextLengthExceeded,
    GatewayError,
    InternalError,
    InvalidRequest,
    KVPoolTooSmall,
    ModeUnavailable,
    Overloaded,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.types import ChatRequest, ChoiceFinished, Finished, FinishReason, Started, StreamEvent, TextDelta
from gateway.upstreams.engine.connection import Answer

RETRY_AFTER_SECONDS = 1.0


def _invalid(failed: Failed) -> GatewayError:
    return InvalidRequest(failed.message, param=failed.param)


ERROR_OF_CODE: dict[str, Callable[[Failed], GatewayError]] = {
    "invalid_request": _invalid,
    "context_length_exceeded": lambda failed: ContextLengthExceeded(failed.message, param=failed.param),
    "kv_pool_too_small": lambda failed: KVPoolTooSmall(failed.message, param=failed.param),
    "queue_full": lambda failed: Overloaded(failed.message, retry_after_seconds=RETRY_AFTER_SECONDS),
    "timeout": lambda failed: UpstreamTimeout(failed.message),
    "peer_lost": lambda failed: UpstreamGone(failed.message),
    "transfer_failed": lambda failed: UpstreamGone(failed.message),
    "draining": lambda failed: ModeUnavailable(failed.message, retry_after_seconds=RETRY_AFTER_SECONDS),
    "internal": lambda failed: InternalError(failed.message),
}


def generate_message(request: ChatRequest) -> Generate:
    strategy = request.strategy
    return Generate(
        request_id=request.request_id,
        prompt=request.prompt,
        sampling=request.sampling,
        cache=CacheParams(
            chunk_size=strategy.chunk_size,
            kv_cache_dtype=strategy.kv_cache_dtype,
            enable_prefix_cache=strategy.enable_prefix_cache,
            cache_salt=strategy.cache_salt,
            transfer_mode=strategy.transfer_mode,
        ),
        deadline_seconds=request.deadline_seconds,
    )


def events_of(answer: Answer) -> Sequence[StreamEvent]:
    """The stream events that one message means. Raises what a failure means."""
    match answer:
        case Accepted():
            return [Started(answer.prompt_tokens, answer.max_tokens, answer.notices)]
        case TokenChunk(text="", finish_reason=None) if not answer.token_ids and not answer.logprobs:
            return []  # a step that only computed a part of the prompt
        case TokenChunk():
            delta = TextDelta(answer.text, len(answer.token_ids), answer.index, answer.logprobs)
            if answer.finish_reason is None:
                return [delta]
            return [delta, ChoiceFinished(answer.index, FinishReason(answer.finish_reason), answer.stop_reason)]
        case Done():
            rest = [TextDelta(answer.text, 0, answer.index)] if answer.text else []
            reason = FinishReason(answer.finish_reason)
            return [*rest, Finished(reason, answer.usage, answer.timings, answer.stop_reason, answer.index)]
        case Failed():
            raise ERROR_OF_CODE[answer.code](answer)
