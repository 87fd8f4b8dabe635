"""Checks of a streamed answer: did key, mode and stream survive the way? Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.clients.client import Api
from gateway.core.too_long import says_too_long
from gateway.doctor.answer import Answer, Event, error_words
from gateway.doctor.finding import Finding, ok, problem, warning

# CC Switch's proxy, the least patient of all, waits so long for the first byte and then between two.
FIRST_BYTE_SECONDS = 60.0
SILENCE_SECONDS = 30.0
_SOME_SILENCE_SECONDS = 0.5

_END_EVENTS = {Api.MESSAGES: ("message_stop",), Api.RESPONSES: ("response.completed", "response.incomplete")}
_HEARTBEAT_EVENTS = {Api.MESSAGES: ("ping",), Api.RESPONSES: ("response.in_progress",)}


def is_overflow(answer: Answer) -> bool:
    """Refused since the prompt is longer than the model can hold."""
    message, code = answer.error()
    return answer.status in {400, 413} and (code == "context_length_exceeded" or says_too_long(message))


def check_accepted(answer: Answer, api: Api) -> Iterator[Finding]:
    """That there is a good answer at all."""
    if answer.failure and not answer.status:
        yield problem(f"no answer: {answer.failure}", "", "start the gateway with: kvgate serve")
    elif answer.status != 200:
        yield _refusal(answer, api)


def _refusal(answer: Answer, api: Api) -> Finding:
    message, code = answer.error()
    why, what_to_do = _advice(answer, api, is_model=code == "model_not_found" or "model" in message.lower())
    return problem(f"{api} is answered with HTTP {answer.status}: {message or 'no message'}", why, what_to_do)


def _advice(answer: Answer, api: Api, *, is_model: bool) -> tuple[str, str]:
    """Why, and what to do."""
    if is_overflow(answer):
        why = "the client's instructions and tools alone are longer than the model can hold"
        return why, "raise max_model_len in [engine], or use a model that holds more"
    if answer.status in {400, 404} and is_model:
        return "the model is not served", "choose one that the gateway lists: kvgate connect --model"
    if answer.status in {429, 503, 529}:
        wait = answer.headers.get("retry-after", "")
        hint = f"in {wait} s" if wait else "later"
        return "the gateway can't serve this now", f"try again {hint}; kvgate doctor shows its state"
    by_status = {
        401: ("the key is not one of the gateway's", "give one of [[keys]]: kvgate connect --key"),
        403: ("the key is not one of the gateway's", "give one of [[keys]]: kvgate connect --key"),
        404: (f"this address serves no {api}", "correct the base URL: kvgate connect writes it"),
    }
    failed = "the gateway or its upstream failed" if answer.status >= 500 else "what this client sends is refused"
    return by_status.get(answer.status, (failed, "look at the gateway's log"))


def check_mode(answer: Answer, *, asked: str | None, channel: str) -> Iterator[Finding]:
    """That the mode that was asked for is the one that served, and came by the channel it was sent by."""
    served, source = answer.headers.get("x-cache-mode", ""), answer.headers.get("x-cache-mode-source", "")
    if not served:
        yield problem(
            "the answer says no X-Cache-Mode", "what answers is not kvgate, or a proxy takes its headers away"
        )
    elif served == "unknown":
        yield warning("the upstream doesn't say which mode served", "", "its own documentation says whether it has any")
    elif asked is None:
        yield ok(f"no mode is sent; the gateway's default served: {served}")
    elif served != asked:
        reason = answer.headers.get("x-cache-mode-reason", "")
        yield problem(
            f"{asked} was asked for and {served} served", reason, "kvgate doctor shows which modes are served"
        )
    elif source and source != channel:
        yield warning(
            f"{served} served, but it was chosen by {source}, not by the {channel} that the client sends",
            "something on the way takes X-Cache-Mode away" if channel == "header" else "",
            "use the path: a base URL with /merged or /split in it",
        )
    else:
        yield ok(f"mode {served} arrives (by {source or channel}) and is served")
    for notice in filter(None, answer.headers.get("x-kvgate-notice", "").split("; ")):
        yield warning(f"the gateway remarks: {notice}")


def check_stream(answer: Answer, api: Api) -> Iterator[Finding]:
    """That it is a stream, begins in time, is never silent for long, and ends as this API's streams end."""
    if not answer.is_stream:
        kind = answer.headers.get("content-type", "nothing")
        yield problem(f"no stream came, but {kind}", "streaming was asked for", "look for a proxy in between")
        return
    failed = next((event for event in answer.events if is_error(event)), None)
    if failed is not None:
        yield problem(f"the stream ends with an error: {error_words(loaded(failed))[0]}", "", "see the gateway's log")
    elif answer.failure:
        yield problem(f"the stream does not end: {answer.failure}", "", "see the gateway's log, or look for a proxy")
    elif not any(is_end(event, api) for event in answer.events):
        yield problem(f"the stream ends without the event that ends {api}", "it was cut", "see the gateway's log")
    else:
        yield ok(f"streaming arrives: {_times(answer, api)}")
    yield from check_silence(answer)


def check_silence(answer: Answer) -> Iterator[Finding]:
    if answer.first_byte_seconds > FIRST_BYTE_SECONDS:
        yield warning(
            f"the first byte took {answer.first_byte_seconds:.0f} s",
            f"CC Switch's proxy gives up after {FIRST_BYTE_SECONDS:.0f} s, others after 300 s",
            "lower heartbeat_seconds in [timeouts], or look for a proxy that holds answers back",
        )
    elif answer.longest_silence_seconds > SILENCE_SECONDS:
        yield warning(
            f"nothing came for {answer.longest_silence_seconds:.0f} s in the middle of the stream",
            "clients take a silent stream for a dead one",
            "lower heartbeat_seconds in [timeouts], or look for a proxy that holds answers back",
        )


def check_usage(answer: Answer, api: Api) -> Iterator[Finding]:
    """Clients stumble over a stream that doesn't count its tokens."""
    if answer.is_stream and not answer.failure and not any(_counts(event, api) for event in answer.events):
        yield warning("the stream has no token counts", "some clients fail without them")


def is_end(event: Event, api: Api) -> bool:
    if api is Api.CHAT:
        return event.data == "[DONE]"
    if api is Api.GEMINI:
        candidates = loaded(event).get("candidates") or [{}]
        return isinstance(candidates, list) and bool(candidates[0].get("finishReason"))
    return _kind(event) in _END_EVENTS[api]


def is_error(event: Event) -> bool:
    return _kind(event) in {"error", "response.failed"} or "error" in loaded(event)


def num_heartbeats(answer: Answer, api: Api) -> int:
    """Those after some silence: each API has such an event at its beginning as well."""
    names = _HEARTBEAT_EVENTS.get(api, ())
    before = [0.0, *(event.at_seconds for event in answer.events)]
    beats = [
        event
        for event, last in zip(answer.events, before, strict=False)
        if _kind(event) in names and event.at_seconds - last > _SOME_SILENCE_SECONDS
    ]
    return answer.num_comments + len(beats)


def loaded(event: Event) -> dict[str, Any]:
    try:
        value = json.loads(event.data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _kind(event: Event) -> str:
    return event.name or str(loaded(event).get("type", ""))


def _counts(event: Event, api: Api) -> bool:
    data = loaded(event)
    if api is Api.GEMINI:
        return "usageMetadata" in data
    holders: list[Any] = [data, data.get("message"), data.get("response")]
    return any(isinstance(one, Mapping) and isinstance(one.get("usage"), Mapping) for one in holders)


def _times(answer: Answer, api: Api) -> str:
    first = answer.events[0].at_seconds if answer.events else answer.total_seconds
    beats = num_heartbeats(answer, api)
    heartbeats = f", {beats} heartbeats" if beats else ""
    return (
        f"first event after {first:.1f} s{heartbeats}, {len(answer.events)} events, end after "
        f"{answer.total_seconds:.1f} s"
    )
