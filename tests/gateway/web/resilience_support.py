"""Two targets for one model, and what is said of the first."""

from __future__ import annotations

from web_answers import FAST

from gateway.settings.schema import (
    RouteSettings,
    Settings,
    TargetSettings,
)

MESSAGES = [{"role": "user", "content": "hi"}]


def two_targets(one, other, *, retry=FAST, fallbacks=("b",), **of_a):
    return Settings(
        targets=(
            TargetSettings(name="a", base_url=one.url, models=("m",), **of_a),
            TargetSettings(name="b", base_url=other.url, models=("n",)),
        ),
        routes=(
            RouteSettings(model="m", target="a", fallbacks=fallbacks),
            RouteSettings(model="m", target="b", upstream_model="n"),
        ),
        retry=retry,
    )


def beats():
    from gateway.settings.schema import TimeoutSettings

    return TimeoutSettings(heartbeat_seconds=0.02)
