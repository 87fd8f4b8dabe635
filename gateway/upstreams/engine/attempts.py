"""One request at one of several alike instances; at another one if that fails before anything was generated.

Knows no modes and no settings. Who is chosen is a `Chooser`'s decision.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from backends.protocol.messages import Done, Generate
from gateway.core.errors import ModeUnavailable, Overloaded, UpstreamGone
from gateway.core.types import ChatRequest, InstanceId, Started, StreamEvent
from gateway.upstreams.choosing import Assignment, Chooser
from gateway.upstreams.engine.connection import Answer, EngineConnection
from gateway.upstreams.engine.fleet import Taker

ELSEWHERE = (UpstreamGone, Overloaded, ModeUnavailable)  # what another instance may not suffer from


EventsOf = Callable[[Answer], Sequence[StreamEvent]]


async def stream_from_any(
    takers: Callable[[], Sequence[Taker]],
    chooser: Chooser,
    request: ChatRequest,
    generate: Generate,
    events_of: EventsOf,
) -> AsyncGenerator[StreamEvent, None]:
    """The events of one answer. After a failure without output `Started` comes again, from another instance.

    There must be a taker. Raises what the last one that was tried raised.
    """
    tried: set[InstanceId] = set()
    has_output = False
    while True:
        options = _untried(takers, tried)
        assignment = chooser.choose(list(options), request)
        tried.add(assignment.instance)
        try:
            connection = options[assignment.instance].connection
            async with aclosing(_stream(connection, assignment, generate, events_of)) as events:
                async for event in events:
                    has_output = has_output or not isinstance(event, Started)
                    yield event
            return
        except ELSEWHERE:
            if has_output or not _untried(takers, tried):
                raise
        finally:
            assignment.done()


def _untried(takers: Callable[[], Sequence[Taker]], tried: set[InstanceId]) -> dict[InstanceId, Taker]:
    return {(taker.name, taker.process): taker for taker in takers() if (taker.name, taker.process) not in tried}


async def _stream(
    connection: EngineConnection, assignment: Assignment, generate: Generate, events_of: EventsOf
) -> AsyncGenerator[StreamEvent, None]:
    channel = connection.open(generate)
    try:
        answer: Answer | None = None
        while not isinstance(answer, Done):
            answer = await channel.next()
            for event in events_of(answer):
                if isinstance(event, Started):
                    yield replace(event, instance=assignment.instance[0], instance_reason=assignment.reason)
                    continue
                assignment.first_token()
                yield event
    finally:
        channel.close()
