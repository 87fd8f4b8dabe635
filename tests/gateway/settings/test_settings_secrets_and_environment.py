"""References to the environment, KVGATE_* variables, flags, and what becomes of keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.settings.env_refs import UnresolvedReference, expand
from gateway.settings.errors import SettingsError
from gateway.settings.importers import LoadedSettings, load_settings
from gateway.settings.schema import public_dump, secrets_of

SECRET = "sk-fake-0000"


def load(text: str, folder: Path, environ: dict[str, str] | None = None, **flags: object) -> LoadedSettings:
    path = folder / "file"
    path.write_text(text, encoding="utf-8")
    return load_settings(path, environ=environ or {}, flags={k.replace("__", "."): v for k, v in flags.items()})


def refused(text: str, folder: Path, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load(text, folder, environ)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("${FAKE}", "value"),
        ("$FAKE", "value"),
        ("a${FAKE}b", "avalueb"),
        ("${FAKE:-x}", "value"),
        ("${NONE:-x}", "x"),
        ("${EMPTY:-x}", "x"),
        ("${EMPTY}", ""),
        ("${NONE:-}", ""),
        ("$$FAKE", "$FAKE"),
        ("$$$FAKE", "$value"),
        ("costs 5$", "costs 5$"),
        ("$5", "$5"),
        ("${DOLLAR}", "$FAKE"),
    ],
)
def test_references_are_replaced_once(text, result):
    assert expand(text, {"FAKE": "value", "EMPTY": "", "DOLLAR": "$FAKE"}) == result


@pytest.mark.parametrize("text", ["${NONE}", "$NONE", "${", "${}", "${A B}", "x${FAKE"])
def test_cf_07_references_that_cannot_be_resolved_are_refused(text):
    with pytest.raises(UnresolvedReference):
        expand(text, {"FAKE": "value"})


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ('[server]\napi_base = "http://h"\napi_key = "${FAKE_UNSET}"', "server.api_key (file, line 3)"),
        ('[server]\napi_base = "http://${FAKE_UNSET}"', "server.api_base (file, line 2)"),
        ('[server]\nallowed_hosts = ["a", "$FAKE_UNSET"]', "server.allowed_hosts (file, line 2)"),
        ('[[keys]]\nname = "a"\nkey = "${FAKE_UNSET}"', "keys[0].key (file, line 3)"),
        ('{"cline.openAiApiKey": "${FAKE_UNSET}"}', "cline.openAiApiKey (file, line 1)"),
        ('[provider]\napi_key = "$FAKE_UNSET"', "provider.api_key (file, line 2)"),
    ],
)
def test_cf_07_an_unset_variable_names_the_setting(tmp_path, text, setting):
    message = refused(text, tmp_path)
    assert setting in message
    assert "FAKE_UNSET" in message


def test_cf_07_references_resolve_on_every_path(tmp_path):
    environ = {"HOST_NAME": "h", "PORT": "8123", "KEY": SECRET, "KVGATE_SERVER__MODEL": "${HOST_NAME}-model"}
    text = '[server]\napi_base = "http://${HOST_NAME}/v1"\nport = "$PORT"\nallowed_hosts = ["${HOST_NAME}.lan"]\n'
    loaded = load(text, tmp_path, environ, server__api_key="${KEY}")
    server = loaded.settings.server
    assert (server.api_base, server.port, server.allowed_hosts, server.model) == (
        "http://h/v1",
        8123,
        ("h.lan",),
        "h-model",
    )
    assert server.api_key is not None
    assert server.api_key.get_secret_value() == SECRET


@pytest.mark.parametrize(
    "wrapped", [f"{SECRET}\r\n", f" {SECRET}", f"\t{SECRET}", f"\ufeff{SECRET}", f"Bearer {SECRET}"]
)
@pytest.mark.parametrize("channel", ["file", "reference", "environment"])
def test_au_01_a_key_is_trimmed_with_a_notice_that_does_not_show_it(tmp_path, wrapped, channel):
    text = '[server]\napi_base = "http://h"\n'
    environ = {"KVGATE_SERVER__API_KEY": wrapped} if channel == "environment" else {"K": wrapped}
    if channel == "file":
        text += f"api_key = {json.dumps(wrapped)}\n"
    if channel == "reference":
        text += 'api_key = "${K}"\n'
    loaded = load(text, tmp_path, environ)
    assert secrets_of(loaded.settings) == (SECRET,)
    assert len(loaded.notices) == 1
    assert SECRET not in loaded.notices[0]


@pytest.mark.parametrize(
    "inner", ["sk-fa\r\nke", "sk-fa\tke", "sk-fa\x00ke", "sk-fa ke", "sk-fäke", "os.environ/KEY", "{env:KEY}"]
)
def test_au_01_a_key_unfit_for_a_header_is_refused_without_its_value(tmp_path, inner):
    text = (
        f'[server]\napi_base = "http://h"\napi_key = {json.dumps(inner)}\n[[keys]]\nname="a"\nkey={json.dumps(inner)}'
    )
    message = refused(text, tmp_path)
    assert "server.api_key (file, line 3)" in message
    assert "keys[0].key (file, line 6)" in message
    assert inner not in message
    assert "sk-fa" not in message


@pytest.mark.parametrize("empty", ["", "  ", "${EMPTY}", "${NONE:-}"])
def test_cf_07_an_empty_upstream_key_is_none_and_an_empty_client_key_is_refused(tmp_path, empty):
    environ = {"EMPTY": ""}
    loaded = load(f'[server]\napi_base = "http://h"\napi_key = "{empty}"', tmp_path, environ)
    assert loaded.settings.server.api_key is None
    assert "counts as not set" in loaded.notices[0]
    assert "keys[0].key (file, line 3): is empty" in refused(
        f'[[keys]]\nname = "a"\nkey = "{empty}"', tmp_path, environ
    )


def test_no_error_or_dump_shows_a_secret(tmp_path):
    text = f'[server]\napi_base = "http://h"\napi_key = "{SECRET}"\n[[keys]]\nname="a"\nkey="{SECRET}1"\n'
    text += f'[[targets]]\nname="t"\nbase_url="http://t"\napi_key="{SECRET}2"\n'
    settings = load(text, tmp_path).settings
    assert SECRET not in json.dumps(public_dump(settings))
    assert SECRET not in repr(settings)
    assert len(secrets_of(settings)) == 3
    message = refused(text + "port = 1\n[kv_cache]\nblock_size = 0\n", tmp_path)
    assert SECRET not in message


def test_a_value_that_came_from_the_environment_is_not_shown(tmp_path):
    message = refused('[server]\nport = "${FAKE}"\n[cache_layout]\nmode = "$FAKE"\n', tmp_path, {"FAKE": SECRET})
    assert "server.port" in message
    assert SECRET not in message


def test_flags_win_over_environment_over_file_over_defaults(tmp_path):
    text = '[server]\nport = 1001\nmodel = "file"\nhost = "127.0.0.2"\n'
    environ = {"KVGATE_SERVER__PORT": "1002", "KVGATE_SERVER__MODEL": "env"}
    server = load(text, tmp_path, environ, server__port="1003", server__model=None).settings.server
    assert (server.port, server.model, server.host, server.name) == (1003, "env", "127.0.0.2", "upstream")


def test_environment_takes_lists_switches_and_tables():
    environ = {
        "KVGATE_CACHE_LAYOUT__PREFILL_GPUS": "0",
        "KVGATE_CACHE_LAYOUT__DECODE_GPUS": "[1]",
        "KVGATE_ENGINE__MODES": "pd, merged",
        "KVGATE_SCHEDULER__ENABLE_PREFIX_CACHE": "false",
        "KVGATE_KEYS": '[{"name": "a", "key": "sk-a"}]',
        "KVGATE_REQUEST": '{"max_tokens": 7}',
        "KVGATE_SERVER__PORT": " 8080 ",
        "KVGATE_LOG_LEVEL": "debug",
        "KVGATE_CACHE_DIR": "/x",
        "UNRELATED": "${",
    }
    settings = load_settings(None, environ=environ).settings
    assert settings.cache_layout.prefill_gpus == (0,)
    assert settings.cache_layout.decode_gpus == (1,)
    assert settings.engine is not None
    assert settings.engine.modes == ("split", "merged")
    assert settings.scheduler.enable_prefix_cache is False
    assert settings.keys[0].key.get_secret_value() == "sk-a"
    assert settings.request.max_tokens == 7
    assert settings.server.port == 8080


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("KVGATE_SERVER_PORT", "1", "did you mean KVGATE_SERVER__PORT?"),
        ("KVGATE_SERVER__PROT", "1", "did you mean KVGATE_SERVER__PORT?"),
        ("KVGATE_CONFG", "x", "did you mean KVGATE_CONFIG?"),
        ("KVGATE_KEYS__0__KEY", "x", "did you mean KVGATE_KEY"),
        ("KVGATE_SERVER__PORT", "0x10", "a whole number, at least 0"),
        ("KVGATE_SERVER__PORT", "-1", "at least 0"),
        ("KVGATE_SERVER__PORT", "8080.5", "a whole number, at least 0"),
        ("KVGATE_SERVER__PORT", "١٢", "a whole number, at least 0"),
        ("KVGATE_LIMITS__MAX_REQUEST_MIB", "-1", "a number, above 0"),
        ("KVGATE_LIMITS__MAX_REQUEST_MIB", "0x10", "a number, above 0"),
        ("KVGATE_LIMITS__MAX_REQUEST_MIB", "10MB", "a number, above 0"),
        ("KVGATE_CACHE_LAYOUT__MODE", "both", "merged (chunked, colocated) or split"),
        ("KVGATE_KEYS", '[{"nme": "a"}]', "did you mean name?"),
        ("KVGATE_KEYS", "sk-fake", "not valid JSON"),
        ("KVGATE_KEYS", '["a"]', "a list of objects"),
        ("KVGATE_SERVER", "[]", "an object"),
        ("KVGATE_CACHE_LAYOUT__PREFILL_GPUS", "[0", "not valid JSON"),
    ],
)
def test_cf_08_a_wrong_variable_is_refused_by_name(name, value, part):
    with pytest.raises(SettingsError) as caught:
        load_settings(None, environ={name: value})
    assert f"{name} (environment)" in str(caught.value)
    assert part in str(caught.value)
    assert "sk-fake" not in str(caught.value)


def test_cf_08_an_empty_variable_counts_as_not_set():
    loaded = load_settings(None, environ={"KVGATE_SERVER__PORT": ""})
    assert loaded.settings.server.port == 8000
    assert "KVGATE_SERVER__PORT" in loaded.notices[0]


def test_a_wrong_flag_is_refused_by_its_own_name():
    with pytest.raises(SettingsError, match=r"--port \(command line\): must be a whole number"):
        load_settings(None, environ={}, flags={"server.port": "many"})
    with pytest.raises(SettingsError, match=r"--mode \(command line\): must be merged"):
        load_settings(None, environ={}, flags={"cache_layout.mode": "both"})


def test_keys_of_the_environment_replace_those_of_the_file(tmp_path):
    text = '[[keys]]\nname="a"\nkey="sk-a"\n[[keys]]\nname="b"\nkey="sk-b"\n'
    loaded = load(text, tmp_path, {"KVGATE_KEYS": '[{"name": "c", "key": "sk-c"}]'})
    assert [key.name for key in loaded.settings.keys] == ["c"]
