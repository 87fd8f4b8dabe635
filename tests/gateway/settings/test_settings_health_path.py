"""Options of health checks: where they go, and where they would have no effect."""

from __future__ import annotations

import pytest

from gateway.settings.errors import SettingsError
from gateway.settings.importers import load_settings
from gateway.targets import all_targets


def load(text, folder):
    path = folder / "kvgate.toml"
    path.write_text(text)
    return load_settings(path, environ={})


def test_a_target_and_the_unified_upstream_have_a_path_of_their_own(tmp_path):
    server = '[server]\napi_base = "https://h.example/v1"\napi_health_path = "/live"\n'
    target = '[[targets]]\nname = "t"\nbase_url = "http://127.0.0.1:1/v1"\nhealth_path = "/health?deep=1"\n'
    loaded = load(server + target + "health_seconds = 2.5\n", tmp_path)

    found = [(each.name, each.health_path, each.health_seconds) for each in all_targets(loaded.settings)]
    assert found == [("t", "/health?deep=1", 2.5), ("upstream", "/live", 10.0)]


def test_a_target_of_litellm_has_no_address_to_ask(tmp_path):
    text = '[[targets]]\nname = "t"\nkind = "litellm"\nmodels = ["a/b"]\nhealth_path = "/health"\n'
    with pytest.raises(SettingsError, match=r"targets\[0\]\.health_path .*no address to ask"):
        load(text, tmp_path)


@pytest.mark.parametrize("path", ["health", "http://h/health", "/a b", "/ä", "/" + "a" * 600])
@pytest.mark.parametrize("table", ["targets", "server"])
def test_what_is_no_path_is_refused_by_name(tmp_path, table, path):
    if table == "targets":
        text = f'[[targets]]\nname = "t"\nbase_url = "http://127.0.0.1:1"\nhealth_path = "{path}"\n'
    else:
        text = f'[server]\napi_base = "http://127.0.0.1:1"\napi_health_path = "{path}"\n'
    with pytest.raises(SettingsError, match=r"health_path .*must be a path on the target's own host, such as /health"):
        load(text, tmp_path)


def test_an_interval_without_a_path_has_no_effect_and_says_so(tmp_path):
    text = '[[targets]]\nname = "t"\nbase_url = "http://127.0.0.1:1"\nhealth_seconds = 3\n'
    assert any("health_seconds" in notice and "no effect" in notice for notice in load(text, tmp_path).notices)
