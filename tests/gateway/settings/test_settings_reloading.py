"""What of changed settings takes effect while the gateway runs, and when a file counts as changed."""

from __future__ import annotations

import os

import pytest

from gateway.core.types import CacheMode
from gateway.settings.errors import SettingsError
from gateway.settings.reloading import FIXED, take_over
from gateway.settings.schema import (
    CacheLayoutSettings,
    EngineSettings,
    KeySettings,
    KVCacheSettings,
    LimitSettings,
    RouteSettings,
    ServerSettings,
    Settings,
    TargetSettings,
    TimeoutSettings,
)
from gateway.settings.watching import FileWatch, fingerprint

TARGET = TargetSettings(name="t", base_url="https://h.example/v1")


def test_targets_keys_routes_and_the_mode_take_effect_at_once():
    read = Settings(
        engine=EngineSettings(),
        targets=(TARGET,),
        keys=(KeySettings(key="sk-a", name="a"),),
        routes=(RouteSettings(model="*", target="t"),),
        cache_layout=CacheLayoutSettings(mode=CacheMode.SPLIT),
        timeouts=TimeoutSettings(idle_seconds=7),
        limits=LimitSettings(max_concurrent_requests=3),
    )
    assert take_over(Settings(engine=EngineSettings()), read) == (read, ())


def test_what_sockets_and_processes_were_made_of_stays_and_is_named():
    read = Settings(
        server=ServerSettings(port=1, model="m"),
        kv_cache=KVCacheSettings(block_size=32),
        engine=EngineSettings(model="other", name="else"),
        limits=LimitSettings(max_request_mib=1, max_stop_strings=3),
    )
    settings, left = take_over(Settings(), read)
    assert set(left) == {
        "server.port", "kv_cache.block_size", "engine.model", "engine.name", "limits.max_request_mib",
    }  # fmt: skip
    assert settings.server == ServerSettings(model="m")
    assert settings.kv_cache == KVCacheSettings()
    assert settings.limits == LimitSettings(max_stop_strings=3)
    assert settings.effective_engine() == EngineSettings()


def test_an_engine_that_runs_goes_on_and_one_that_does_not_is_not_begun():
    with_engine, without = Settings(), Settings(targets=(TARGET,))
    kept, left = take_over(with_engine, without)
    assert (kept.effective_engine(), left) == (EngineSettings(), ("engine.enabled",))
    assert kept.targets == (TARGET,)
    kept, left = take_over(without, with_engine)
    assert (kept.effective_engine(), left) == (None, ("engine",))


def test_what_does_not_go_together_with_what_stays_is_refused():
    running = Settings(targets=(TARGET,))
    read = Settings(engine=EngineSettings(), targets=(TARGET,), routes=(RouteSettings(model="x", target="local"),))
    with pytest.raises(SettingsError, match="no target is named 'local'") as raised:
        take_over(running, read)
    assert "keep their values until a restart: engine" in str(raised.value)


def test_every_fixed_option_exists():
    for table, names in FIXED.items():
        model = getattr(Settings(), table)
        assert all(hasattr(model, name) for name in names), table


# ----------------------------------------------------------------------------------------------------------- watching


class Files(dict):
    def __call__(self, path):
        return self.get(path)


def test_a_change_counts_once_it_holds_still():
    files = Files(a=(1, 1, 1))
    watch = FileWatch(["a"], files)
    assert not watch.has_changed()
    files["a"] = (2, 1, 1)
    assert not watch.has_changed()
    files["a"] = (3, 9, 1)  # still being written
    assert not watch.has_changed()
    assert watch.has_changed()
    assert not watch.has_changed()


def test_a_file_that_goes_and_comes_is_a_change_each_time():
    files = Files(a=(1, 1, 1))
    watch = FileWatch(["a"], files)
    del files["a"]
    assert [watch.has_changed() for _ in range(3)] == [False, True, False]
    files["a"] = (1, 1, 2)
    assert [watch.has_changed() for _ in range(3)] == [False, True, False]


def test_another_list_keeps_what_was_known_of_files_on_both():
    files = Files(a=(1, 1, 1), b=(1, 1, 1))
    watch = FileWatch(["a"], files)
    files["a"] = (2, 1, 1)  # while the settings were being read
    watch.watch(["a", "b"])
    assert [watch.has_changed() for _ in range(2)] == [False, True]
    files["b"] = (2, 1, 1)
    assert [watch.has_changed() for _ in range(2)] == [False, True]
    watch.watch(["b"])
    files["a"] = (3, 1, 1)
    assert [watch.has_changed() for _ in range(2)] == [False, False]


def test_real_files_differ_by_content_time_and_by_being_exchanged(tmp_path):
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_text("one")
    first = fingerprint(path)
    assert fingerprint(path) == first
    other.write_text("two")
    os.utime(other, ns=(1, first[0]))
    os.replace(other, path)  # as editors and mounts do it
    assert fingerprint(path) != first
    assert fingerprint(tmp_path / "none") is None
