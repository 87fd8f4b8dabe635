"""Keys that the settings name by a file, options of targets of litellm, and limits of keys that contradict."""

from __future__ import annotations

import json
import os
import socket

import pytest

from gateway.settings.errors import SettingsError
from gateway.settings.files import read_key
from gateway.settings.importers import load_settings
from gateway.settings.schema import public_dump, secrets_of

KEY = "sk-file-0123456789"


def load(text, folder, environ=None):
    path = folder / "kvgate.toml"
    path.write_text(text)
    return load_settings(path, environ=environ or {})


def problems(text, folder):
    with pytest.raises(SettingsError) as raised:
        load(text, folder)
    return str(raised.value)


def server(line):
    return f'[server]\napi_base = "https://h.example/v1"\n{line}\n'


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "secret.key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("content", [KEY, f"{KEY}\r\n", f"  {KEY}\n\n", f"\ufeff{KEY}", f"Bearer {KEY}\n", f"\t{KEY} "])
def test_au_01_a_key_file_s_line_end_and_blanks_are_no_part_of_the_key(tmp_path, key_file, content):
    key_file.write_text(content, encoding="utf-8")
    loaded = load(server('api_key_file = "secret.key"'), tmp_path)
    assert loaded.settings.server.api_key.get_secret_value() == KEY
    assert list(loaded.files) == [tmp_path / "kvgate.toml", key_file]
    assert KEY not in str(loaded.notices)


def test_every_kind_of_key_may_be_in_a_file_and_is_hidden(tmp_path, key_file):
    target = '[[targets]]\nname = "t"\nbase_url = "https://h.example/v1"\napi_key_file = "secret.key"\n'
    keys = f'[[keys]]\nname = "k"\nkey_file = "{key_file}"\n'
    settings = load(target + keys, tmp_path).settings
    assert settings.keys[0].key.get_secret_value() == settings.targets[0].api_key.get_secret_value() == KEY
    assert KEY not in json.dumps(public_dump(settings))
    assert set(secrets_of(settings)) == {KEY}
    assert KEY not in repr(settings)


def test_a_link_to_a_key_file_is_what_is_watched_for_it_may_be_led_elsewhere(tmp_path, key_file):
    (tmp_path / "link.key").symlink_to(key_file)
    loaded = load(server('api_key_file = "link.key"'), tmp_path)
    assert list(loaded.files) == [tmp_path / "kvgate.toml", tmp_path / "link.key"]


def test_a_key_file_that_is_missing_is_told_with_the_problem_for_it_may_yet_come(tmp_path):
    with pytest.raises(SettingsError, match="the key file does not exist") as raised:
        load(server('api_key_file = "later.key"'), tmp_path)
    assert raised.value.files[tmp_path / "later.key"] is None


def test_a_path_may_come_from_the_environment_and_from_home(tmp_path, key_file, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("~/secret.key", "${DIR}/secret.key"):
        loaded = load(server(f'api_key_file = "{name}"'), tmp_path, {"DIR": str(tmp_path)})
        assert loaded.settings.server.api_key.get_secret_value() == KEY


def test_a_dollar_in_a_key_file_is_a_dollar(tmp_path, key_file):
    key_file.write_text("sk-$HOME-$$-${X}")
    loaded = load(server('api_key_file = "secret.key"'), tmp_path)
    assert loaded.settings.server.api_key.get_secret_value() == "sk-$HOME-$$-${X}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        (f"{KEY}\n{KEY}", "alone, in one line"),
        (f"{KEY} x", "a blank"),
        ("é-key", ""),
    ],
)
def test_au_01_what_is_no_key_is_refused_without_being_shown(tmp_path, key_file, content, said):
    key_file.write_text(content)
    text = problems(server('api_key_file = "secret.key"'), tmp_path)
    assert said in text
    assert "api_key_file (kvgate.toml, line 3)" in text
    assert KEY not in text
    assert "é" not in text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_cf_01_a_key_file_in_utf_16_is_refused_without_being_shown(tmp_path, key_file, encoding):
    """What an editor of Windows may write. Read as UTF-8 it would be a key of twice the length."""
    key_file.write_bytes(f"{KEY}\r\n".encode(encoding))
    text = problems(server('api_key_file = "secret.key"'), tmp_path)
    assert "UTF-16" in text
    assert "save it as UTF-8" in text
    assert KEY[3:] not in text.replace("\0", "")


def test_a_file_that_is_not_there_a_folder_and_both_ways_at_once(tmp_path, key_file):
    assert "the key file does not exist" in problems(server('api_key_file = "none.key"'), tmp_path)
    assert "is a directory; a key file is needed" in problems(server('api_key_file = "."'), tmp_path)
    both = server('api_key = "sk-other-0123"\napi_key_file = "secret.key"')
    assert "gives the same key" in problems(both, tmp_path)
    assert "sk-other" not in problems(both, tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="files of POSIX")
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device", "socket"])
def test_a_key_file_that_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path, kind):
    path = tmp_path / "odd.key"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        path.symlink_to("/dev/zero" if kind == "device" else pipe) if kind != "pipe" else pipe.rename(path)

    text = problems(server('api_key_file = "odd.key"'), tmp_path)
    assert text.startswith(f"server.api_key_file (kvgate.toml, line 3): {path}: is a {kind.rpartition(' ')[2]}; ")
    assert "must be a regular file" in text


@pytest.mark.skipif(os.name != "posix", reason="files of POSIX")
def test_a_pipe_that_takes_the_place_of_a_key_file_while_it_is_opened_is_refused_too(tmp_path, key_file, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    real = os.open

    def swapped(path, flags, *rest, **options):
        (tmp_path / "pipe").replace(key_file)
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(SettingsError, match="is a pipe"):
        read_key(key_file)


def test_a_key_file_is_not_read_beyond_what_a_key_may_be(tmp_path, key_file):
    key_file.write_text(KEY * 10_000)
    text = problems(server('api_key_file = "secret.key"'), tmp_path)
    assert "server.api_key_file (kvgate.toml, line 3)" in text
    assert f"{key_file}: is larger than 64 KiB" in text
    assert KEY not in text


def test_cf_07_a_client_key_whose_file_is_missing_never_opens_the_gateway(tmp_path):
    assert "does not exist" in problems('[[keys]]\nname = "k"\nkey_file = "none.key"\n', tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_file_that_others_may_read_is_worth_a_notice(tmp_path, key_file):
    text = server('api_key_file = "secret.key"')
    assert not load(text, tmp_path).notices
    key_file.chmod(0o644)
    assert any("chmod 600" in notice for notice in load(text, tmp_path).notices)


# ------------------------------------------------------------------------------------------------------------ litellm

FAR = '[[targets]]\nname = "far"\nkind = "litellm"\n'


def test_a_target_of_litellm_needs_no_address(tmp_path):
    text = FAR + 'models = ["anthropic/m"]\nparams = { aws_region_name = "eu", aws_secret_access_key = "${S}" }\n'
    loaded = load(text, tmp_path, {"S": "very-secret-value"})
    target = loaded.settings.targets[0]
    assert {name: value.get_secret_value() for name, value in target.params.items()} == {
        "aws_region_name": "eu",
        "aws_secret_access_key": "very-secret-value",
    }
    assert loaded.notices == ()
    assert "very-secret-value" not in json.dumps(public_dump(loaded.settings)) + repr(loaded.settings)
    assert "very-secret-value" in secrets_of(loaded.settings)


def test_parameters_as_a_table_of_their_own(tmp_path):
    loaded = load(FAR + '[targets.params]\napi_version = "2026-01-01"\n', tmp_path)
    assert loaded.settings.targets[0].params["api_version"].get_secret_value() == "2026-01-01"


def test_an_openai_target_needs_an_address_and_takes_no_parameters(tmp_path):
    text = problems('[[targets]]\nname = "t"\nparams = { a = "b" }\n', tmp_path)
    assert "base_url" in text
    assert "is missing" in text
    assert "arguments of litellm" in text


@pytest.mark.parametrize("name", ["api_key", "api_base", "model", "mock_response", "extra_body"])
def test_what_the_gateway_itself_says_can_not_be_a_parameter(tmp_path, name):
    assert f"{name} can't be one of them" in problems(FAR + f'params = {{ {name} = "sk-hidden" }}\n', tmp_path)
    assert "sk-hidden" not in problems(FAR + f'params = {{ {name} = "sk-hidden" }}\n', tmp_path)


def test_parameters_are_texts(tmp_path):
    text = problems(FAR + "params = { a = 3 }\n", tmp_path)
    assert "a table of texts" in text


def test_what_has_no_effect_there_is_said(tmp_path):
    notices = " ".join(load(FAR + "forward_client_key = true\n", tmp_path).notices)
    assert "forward_client_key" in notices
    assert "no model leads to 'far'" in notices


# ----------------------------------------------------------------------------------------------------- limits of keys

LIMITED = '[[keys]]\nname = "k"\nkey = "sk-client-0123"\n'


def test_limits_of_a_key(tmp_path):
    text = LIMITED + 'modes = ["pd"]\nmode = "split"\nmodels = ["a*"]\nrequests_per_minute = 3\nbudget_usd = 1.5\n'
    loaded = load(text, tmp_path)
    key = loaded.settings.keys[0]
    assert (key.modes, key.models, key.requests_per_minute, key.budget_usd) == (("split",), ("a*",), 3, 1.5)
    assert any("a restart begins its budget anew" in notice for notice in loaded.notices)


def test_a_key_that_may_not_use_its_own_mode_is_refused(tmp_path):
    assert "the default mode, merged, is not among them" in problems(LIMITED + 'modes = ["split"]\n', tmp_path)
    both = 'modes = ["split"]\nmode = "merged"\n'
    assert "its own mode, merged" in problems(LIMITED + both, tmp_path)


@pytest.mark.parametrize(
    "line", ["requests_per_minute = 0", "max_concurrent = -1", "budget_usd = -1", 'budget_period = "hour"']
)
def test_limits_that_are_none_are_refused(tmp_path, line):
    assert line.split()[0] in problems(LIMITED + line + "\n", tmp_path)


def test_a_period_without_a_budget_has_no_effect(tmp_path):
    notices = load(LIMITED + 'budget_period = "day"\n', tmp_path).notices
    assert any("no effect without budget_usd" in notice for notice in notices)
