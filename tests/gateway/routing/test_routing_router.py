"""Which target answers for a model, and why."""

from __future__ import annotations

import pytest

from gateway.core.errors import InvalidRequest, ModelNotFound
from gateway.core.types import ModelCard, Route
from gateway.routing.router import Router
from gateway.settings.schema import Settings

TARGETS = [
    {"name": "second", "base_url": "http://s", "models": ["s-1", "s-2"]},
    {"name": "third", "base_url": "http://t"},
]


def make_router(*cards: ModelCard, **tables: object) -> Router:
    return Router(Settings.model_validate(tables), cards)


def everything(**more: object) -> dict[str, object]:
    return {"engine": {}, "server": {"api_base": "http://u"}, "targets": TARGETS, **more}


def test_the_local_model_is_served_locally():
    assert make_router().route("smollm2") == Route("local", "smollm2", "local model")


def test_an_unknown_model_is_refused_with_the_list_when_nothing_catches_all():
    router = make_router(engine={}, targets=TARGETS, routes=[{"model": "alias", "target": "second"}])
    with pytest.raises(ModelNotFound) as caught:
        router.route("gpt-9")
    assert caught.value.known == ("alias", "smollm2", "s-1", "s-2")
    with pytest.raises(ModelNotFound):
        router.route("SMOLLM2")


def test_the_unified_upstream_serves_what_nobody_else_does():
    router = make_router(**everything())
    assert router.route("gpt-9") == Route("upstream", "gpt-9", "unified upstream serves every other model")
    assert router.route("s-2") == Route("second", "s-2", "listed by second")
    assert router.route("smollm2").target == "local"


def test_models_that_a_target_told_us_of_are_routed_to_it():
    router = make_router(ModelCard("t-1", "third"), ModelCard("smollm2", "third"), **everything())
    assert router.route("t-1").target == "third"
    assert router.route("smollm2").target == "local"
    assert "t-1" in router.model_names()
    assert len(set(router.model_names())) == len(router.model_names())


def test_routes_come_first_and_the_first_match_wins():
    routes = [
        {"model": "smol*", "target": "second", "upstream_model": "s-1"},
        {"model": "smollm2", "target": "third"},
        {"model": "gpt-?", "target": "local"},
    ]
    router = make_router(**everything(routes=routes))
    assert router.route("smollm2") == Route("second", "s-1", "route smol*")
    assert router.route("gpt-4") == Route("local", "smollm2", "route gpt-?")
    assert router.route("gpt-40").target == "upstream"
    assert router.route("GPT-4").target == "upstream"


def test_a_forced_target_wins_and_its_own_route_still_names_the_model():
    routes = [{"model": "a", "target": "local"}, {"model": "a", "target": "second", "upstream_model": "s-1"}]
    router = make_router(**everything(routes=routes))
    assert router.route("a", "second") == Route("second", "s-1", "X-Cache-Backend, route a")
    assert router.route("a", " THIRD ") == Route("third", "a", "X-Cache-Backend")
    assert router.route("a", "local").upstream_model == "smollm2"
    assert router.route("smollm2", "").target == "local"


def test_the_local_engine_never_answers_for_another_model():
    with pytest.raises(ModelNotFound) as caught:
        make_router(**everything()).route("gpt-9", "local")
    assert caught.value.known == ("smollm2",)


def test_an_unknown_forced_target_is_refused_with_the_names():
    router = make_router(**everything())
    with pytest.raises(InvalidRequest) as caught:
        router.route("a", "nowhere\r\n")
    assert "targets: local, second, third, upstream" in caught.value.message
    assert caught.value.param == "X-Cache-Backend"
    with pytest.raises(InvalidRequest):
        make_router().route("smollm2", "upstream")


@pytest.mark.parametrize("model", [None, ""])
def test_without_a_model_the_settings_then_the_only_engine_decide(model):
    assert make_router().route(model).upstream_model == "smollm2"
    assert make_router(**everything(server={"api_base": "http://u", "model": "d"})).route(model).upstream_model == "d"
    assert make_router(**everything()).route(model, "local").upstream_model == "smollm2"
    with pytest.raises(InvalidRequest) as caught:
        make_router(**everything()).route(model)
    assert caught.value.param == "model"
    assert "smollm2" in caught.value.message
    with pytest.raises(InvalidRequest):
        make_router(server={"api_base": "http://u"}).route(model)


def test_names_of_targets_are_the_settings_own():
    router = make_router(engine={"name": "here", "served_name": "m"}, server={"api_base": "http://u", "name": "tao"})
    assert router.targets == ("here", "tao")
    assert router.route("m").target == "here"
    assert router.route("x").target == "tao"
