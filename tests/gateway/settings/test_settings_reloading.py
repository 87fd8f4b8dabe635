"""What of changed settings takes effect while the gateway runs, and when a file counts as changed."""

from __future__ import annotations

import os

import pytest
from pydantic import BaseModel

from gateway.core.types import CacheMode
from gateway.settings.errors import SettingsError
from gateway.settings.importers import load_settings
from gateway.settings.options import list_tables
from gateway.settings.reloading import FIXED, take_over
from gateway.settings.schema import (
    CacheLayoutSettings,
    EngineSettings,
    KeySettings,
    KVCacheSettings,
    LimitSettings,
    PairSettings,
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


PAIR = PairSettings(name="p", engine="vllm", merged=("http://h",))
CHANGED = {bool: lambda value: not value, int: lambda value: value + 1, float: lambda value: value / 2}
OTHERS = {
    "host": "localhost", "api_base": "https://h.example", "api_key_file": "k", "model": "m", "name": "else",
    "mode": CacheMode.SPLIT,
    "kv_cache_dtype": "int8", "kv_transfer_mode": "request", "backend": "nixl", "dtype": "fp32", "weight_dtype": "int8",
    "device": "cpu", "served_name": "x", "prefill_endpoint": "https://h.example", "decode_endpoint": "https://h.example",
    "modes": (CacheMode.MERGED,), "kv_cache_variants": ("int8",), "allowed_hosts": ("h",), "api_price_model": "m",
    "api_dialects": ("openai_chat",), "api_key": "sk-a",
}  # fmt: skip


def changed_options():
    """Every option of every table that is no list, with a value that it doesn't have by default."""
    defaults = Settings(engine=EngineSettings())
    for table in Settings.model_fields:
        part = getattr(defaults, table)
        for name in type(part).model_fields if isinstance(part, BaseModel) else ():
            yield pytest.param(table, name, id=f"{table}.{name}")


@pytest.mark.parametrize(("table", "name"), list(changed_options()))
def test_every_option_takes_effect_or_is_named_as_one_that_waits_for_a_restart(table, name):
    running = Settings(engine=EngineSettings())
    part = getattr(running, table)
    old = getattr(part, name)
    new = OTHERS.get(name) or (
        CHANGED[type(old)](old) if type(old) in CHANGED else (3,) if isinstance(old, tuple) else 3
    )
    read = running.model_copy(update={table: part.model_copy(update={name: new})})
    try:
        settings, left = take_over(running, read)
    except SettingsError:
        assert name in ("enabled", "prefill_endpoint", "decode_endpoint", "modes", "mode"), "can't be changed alone"
        return
    in_force = getattr(getattr(settings, table) or EngineSettings(enabled=False), name)
    assert (in_force, left) in [(new, ()), (old, (f"{table}.{name}",))]
    assert left or table not in ("engine", "kv_cache", "scheduler", "transfer"), "instances were started with it"


def test_lists_of_tables_all_take_effect_at_once():
    read = Settings(
        engine=EngineSettings(),
        keys=(KeySettings(key="sk-a", name="a"),),
        targets=(TARGET,),
        pairs=(PAIR,),
        routes=(RouteSettings(model="*", target="p"),),
    )
    assert set(list_tables()) == {"keys", "targets", "pairs", "routes"}
    assert take_over(Settings(engine=EngineSettings()), read) == (read, ())


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
    watch = FileWatch(files, files)
    assert not watch.has_changed()
    files["a"] = (2, 1, 1)
    assert not watch.has_changed()
    files["a"] = (3, 9, 1)  # still being written
    assert not watch.has_changed()
    assert watch.has_changed()
    assert not watch.has_changed()


def test_a_file_that_goes_and_comes_is_a_change_each_time():
    files = Files(a=(1, 1, 1))
    watch = FileWatch(files, files)
    del files["a"]
    assert [watch.has_changed() for _ in range(3)] == [False, True, False]
    files["a"] = (1, 1, 2)
    assert [watch.has_changed() for _ in range(3)] == [False, True, False]


def test_a_file_that_was_changed_after_it_was_read_has_changed_whoever_looks_when():
    files = Files(a=(1, 1, 1), b=(1, 1, 1))
    read = dict(files)
    files["a"] = (2, 1, 1)  # while the gateway was starting
    watch = FileWatch(read, files)
    assert [watch.has_changed() for _ in range(3)] == [False, True, False]
    read = dict(files)
    files["b"] = (2, 1, 1)  # while the settings were read again
    watch.watch(read)
    assert [watch.has_changed() for _ in range(3)] == [False, True, False]
    watch.watch({"b": files["b"]})
    files["a"] = (3, 1, 1)
    assert [watch.has_changed() for _ in range(2)] == [False, False]


def test_what_the_settings_of_before_name_is_watched_besides_what_refused_ones_name():
    files = Files(a=(1, 1, 1))
    watch = FileWatch(files, files)
    watch.watch_too({"b": None})
    files["b"] = (1, 1, 1)
    assert [watch.has_changed() for _ in range(3)] == [False, True, False]
    files["a"] = (2, 1, 1)
    assert [watch.has_changed() for _ in range(3)] == [False, True, False]


def test_what_is_told_of_a_file_is_how_it_was_when_it_was_read(tmp_path):
    path = tmp_path / "kvgate.toml"
    path.write_text("[server]\nport = 1\n")
    loaded = load_settings(path, environ={})
    path.write_text("[server]\nport = 22\n")
    watch = FileWatch(loaded.files)
    assert [watch.has_changed() for _ in range(2)] == [False, True]


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
def test_a_pipe_never_changes(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert fingerprint(tmp_path / "pipe") is None


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
