"""Who stands in for a target that fails, and under which name it knows the model."""

from __future__ import annotations

import pytest

from gateway.routing.router import Router
from gateway.settings.errors import SettingsError
from gateway.settings.importers import load_settings
from gateway.settings.schema import Settings

TARGETS = [{"name": name, "base_url": f"http://{name}"} for name in ("a", "b", "c")]


def router(*routes: dict[str, object], **more: object) -> Router:
    return Router(Settings.model_validate({"targets": TARGETS, "routes": list(routes), **more}))


def fallbacks(made: Router, model: str | None, forced: str | None = None) -> list[tuple[str, str]]:
    return [(route.target, route.upstream_model) for route in made.fallbacks(model, made.route(model, forced))]


def test_a_fallback_s_own_name_for_the_model_is_that_of_a_route_that_leads_there():
    made = router(
        {"model": "gpt-*", "target": "a", "upstream_model": "x", "fallbacks": ["b", "c"]},
        {"model": "gpt-4", "target": "b", "upstream_model": "y"},
    )
    assert fallbacks(made, "gpt-4") == [("b", "y"), ("c", "gpt-4")]
    assert fallbacks(made, "gpt-5") == [("b", "gpt-5"), ("c", "gpt-5")]


def test_only_the_route_that_decided_has_a_say_and_never_against_the_client():
    made = router(
        {"model": "m", "target": "a"},
        {"model": "m", "target": "b", "fallbacks": ["c"]},
        {"model": "n", "target": "a", "fallbacks": ["b"]},
    )
    assert fallbacks(made, "m") == []
    assert fallbacks(made, "n") == [("b", "n")]
    assert fallbacks(made, "n", forced="a") == []
    assert fallbacks(made, "n", forced="b") == []


def test_the_local_engine_stands_in_with_its_own_model():
    made = router({"model": "gpt-*", "target": "a", "fallbacks": ["local"]}, engine={"model": "smollm2"})
    assert fallbacks(made, "gpt-4") == [("local", "smollm2")]


def test_the_default_model_has_fallbacks_too():
    made = router({"model": "m", "target": "a", "fallbacks": ["b"]}, server={"model": "m"})
    assert fallbacks(made, None) == [("b", "m")]


FILE = """
[[targets]]
name = "a"
base_url = "http://a"
[[targets]]
name = "b"
base_url = "http://b"
[[routes]]
model = "m"
target = "a"
fallbacks = {}
[retry]
max_attempts = {}
"""


@pytest.mark.parametrize(
    ("written", "words"),
    [('["c"]', "no target is named 'c'; targets: a, b"), ('["a"]', "asked already"), ('["b", "b"]', "asked already")],
)
def test_a_fallback_is_another_target_that_exists(tmp_path, written, words):
    path = tmp_path / "file.toml"
    path.write_text(FILE.format(written, 3))
    with pytest.raises(SettingsError, match=words) as refusal:
        load_settings(path, environ={})
    assert "routes[0].fallbacks (" in str(refusal.value)


@pytest.mark.parametrize(("attempts", "is_told"), [(1, True), (2, False)])
def test_a_fallback_that_no_attempt_is_left_for_is_told(tmp_path, attempts, is_told):
    path = tmp_path / "file.toml"
    path.write_text(FILE.format('["b"]', attempts))
    told = [notice for notice in load_settings(path, environ={}).notices if "can't be reached" in notice]
    assert bool(told) is is_told
