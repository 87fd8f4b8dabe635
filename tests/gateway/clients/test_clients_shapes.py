"""What is written for each client is what it reads; every address and channel is its best."""

from __future__ import annotations

import base64
import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gateway.clients import cc_switch, curl
from gateway.clients.catalog import FILE_CLIENTS, NAMES
from gateway.clients.choosing import Said, gateway_url, key_for, mask, masked, target_for
from gateway.clients.claude import MODEL_SLOTS
from gateway.clients.client import Client
from gateway.clients.document import Format
from gateway.clients.header_list import split_headers, with_header
from gateway.clients.merging import merge, open_document
from gateway.clients.served import Served, parse
from gateway.clients.target import Limits, Target, limits_of
from gateway.core.types import CacheMode
from gateway.settings.errors import SettingsError
from gateway.settings.schema import EngineSettings, KeySettings, ServerSettings, Settings

URL = "http://127.0.0.1:8000"
TARGET = Target(URL, "sk-key-0123456789", "smollm2", CacheMode.SPLIT, Limits(8192, 1024))
ALL = pytest.mark.parametrize("client", FILE_CLIENTS.values(), ids=list(FILE_CLIENTS))

# What the strict reader of a provider table in Codex 0.171 knows.
CODEX_PROVIDER_KEYS = {
    "name", "base_url", "env_key", "env_key_instructions", "experimental_bearer_token", "auth", "wire_api",
    "query_params", "http_headers", "env_http_headers", "request_max_retries", "stream_max_retries",
    "stream_idle_timeout_ms", "websocket_connect_timeout_ms", "requires_openai_auth", "supports_websockets",
}  # fmt: skip


def written(client: Client, target: Target = TARGET) -> dict[str, Any]:
    return open_document(client.format, merge(client.format, "", client.entries(target)).text).plain()


def test_all_clients_are_there():
    assert set(NAMES) == {"cline", "claude", "codex", "opencode", "continue", "gemini", "cc-switch", "curl"}


@ALL
def test_what_is_written_is_read_back(client: Client):
    connection = client.read_back(written(client), {})
    assert connection is not None
    assert connection.base_url == (URL if client.name in {"claude", "gemini"} else f"{URL}/v1")
    assert (connection.key, connection.model) == (TARGET.key, TARGET.model)
    assert dict(connection.headers) == {"X-Cache-Mode": "split"}
    assert connection.remarks == ()


@ALL
def test_without_a_mode_no_header_is_sent_and_without_limits_none_are_written(client: Client):
    plain = written(client, Target(URL, "local", "m"))
    connection = client.read_back(plain, {})
    assert connection is not None
    assert not connection.headers
    assert (connection.context, connection.output) == (None, None)
    assert "X-Cache-Mode" not in json.dumps(plain)


@ALL
def test_empty_settings_point_nowhere(client: Client):
    assert client.read_back({}, {}) is None


@pytest.mark.parametrize("name", ["cline", "opencode", "continue"])
def test_limits_of_context_and_answer_are_written(name: str):
    connection = FILE_CLIENTS[name].read_back(written(FILE_CLIENTS[name]), {})
    assert connection is not None
    assert (connection.context, connection.output) == (8192, 1024)


def test_codex_gets_only_keys_that_it_knows_and_its_context():
    plain = written(FILE_CLIENTS["codex"])
    assert set(plain) == {"model", "model_provider", "model_context_window", "model_providers"}
    assert set(plain["model_providers"]["kvgate"]) <= CODEX_PROVIDER_KEYS
    assert plain["model_providers"]["kvgate"]["wire_api"] == "responses"
    assert plain["model_context_window"] == 8192


def test_claude_gets_all_four_models_and_no_changing_first_line():
    env = written(FILE_CLIENTS["claude"])["env"]
    assert [env[name] for name in MODEL_SLOTS] == ["smollm2"] * 4
    assert len(MODEL_SLOTS) == 4
    assert env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "1024"
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in env
    large = written(FILE_CLIENTS["claude"], Target(URL, "local", "m", limits=Limits(131_072, 8192)))["env"]
    assert large["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "131072"
    assert all(isinstance(value, str) for value in env.values())


def test_claude_reads_its_own_environment_before_the_shells():
    claude = FILE_CLIENTS["claude"]
    shell = {"ANTHROPIC_BASE_URL": "http://shell", "ANTHROPIC_API_KEY": "k"}
    alone = claude.read_back({}, shell)
    assert alone is not None
    assert (alone.base_url, alone.key_header) == ("http://shell", "x-api-key")
    assert any("not set" in remark for remark in alone.remarks)
    both = claude.read_back(written(claude), shell)
    assert both is not None
    assert (both.base_url, both.key_header) == (URL, "Authorization")
    assert any("two keys" in remark for remark in both.remarks)


def test_codex_remarks_what_stands_in_the_way():
    codex = FILE_CLIENTS["codex"]
    plain = written(codex) | {"profile": "work"}
    plain["model_providers"]["kvgate"] |= {"env_key": "NOT_SET", "env_http_headers": {"X-Cache-Mode": "MODE"}}
    connection = codex.read_back(plain, {"MODE": "merged"})
    assert connection is not None
    assert connection.mode_header == "merged"
    assert len(connection.remarks) == 2


def test_files_are_where_the_clients_look(tmp_path: Path):
    found = {name: client.find_file(tmp_path, {}).relative_to(tmp_path) for name, client in FILE_CLIENTS.items()}
    assert {name: str(path) for name, path in found.items()} == {
        "cline": ".cline/data/settings/providers.json",
        "claude": ".claude/settings.json",
        "codex": ".codex/config.toml",
        "opencode": ".config/opencode/opencode.json",
        "continue": ".continue/config.yaml",
        "gemini": ".gemini/.env",
    }
    moved = {
        "CLINE_DATA_DIR": "/m", "CLAUDE_CONFIG_DIR": "/m", "CODEX_HOME": "/m", "XDG_CONFIG_HOME": "/m",
        "CONTINUE_GLOBAL_DIR": "/m", "GEMINI_CLI_HOME": "/m",
    }  # fmt: skip
    assert all(str(client.find_file(tmp_path, moved)).startswith("/m/") for client in FILE_CLIENTS.values())
    commented = tmp_path / ".config" / "opencode" / "opencode.jsonc"
    commented.parent.mkdir(parents=True)
    commented.touch()
    assert FILE_CLIENTS["opencode"].find_file(tmp_path, {}) == commented


# -------------------------------------------------------------------------------------------------- CC Switch and curl


def links(target: Target, *, show_key: bool = True) -> dict[str, dict[str, str]]:
    """What CC Switch's parser takes out of each link."""
    found = {}
    for _, link in cc_switch.lines(target, show_key):
        parts = urlsplit(link)
        assert (parts.scheme, parts.netloc, parts.path) == ("ccswitch", "v1", "/import")
        assert "+" not in parts.query
        fields = {name: values[0] for name, values in parse_qs(parts.query, strict_parsing=True).items()}
        assert fields["resource"] == "provider"
        assert fields["endpoint"]
        assert fields["apiKey"]
        found[fields["app"]] = fields
    return found


def test_the_address_carries_the_mode_wherever_headers_do_not_survive_the_import():
    found = links(TARGET)
    assert {app: fields["endpoint"] for app, fields in found.items()} == {
        "claude": URL,
        "codex": f"{URL}/split/v1",
        "opencode": f"{URL}/split/v1",
        "gemini": f"{URL}/split",
    }
    assert found["claude"]["name"] == "kvgate (split)"
    assert links(Target(URL, "local", "m"))["codex"]["endpoint"] == f"{URL}/v1"


def test_claude_keeps_its_whole_environment_and_none_of_it_looks_like_an_attack():
    fields = links(TARGET)["claude"]
    env = json.loads(base64.urlsafe_b64decode(fields["config"]))["env"]
    assert fields["configFormat"] == "json"
    assert env["ANTHROPIC_CUSTOM_HEADERS"] == "X-Cache-Mode: split"
    assert env["ANTHROPIC_AUTH_TOKEN"] == TARGET.key
    assert [fields[name] for name in ("model", "haikuModel", "sonnetModel", "opusModel")] == ["smollm2"] * 4
    assert not any(name in {"PATH", "NODE_OPTIONS"} or "PROXY" in name or "LD_" in name for name in env)


def test_a_real_key_is_in_no_link_unless_it_is_asked_for():
    text = json.dumps(cc_switch.lines(TARGET, False))
    config = links(TARGET, show_key=False)["claude"]["config"]
    assert TARGET.key not in text + base64.urlsafe_b64decode(config).decode()
    assert {fields["apiKey"] for fields in links(TARGET, show_key=False).values()} == {cc_switch.PLACEHOLDER}
    assert {fields["apiKey"] for fields in links(Target(URL, "local", "m"), show_key=False).values()} == {"local"}


def test_curl_is_one_command_for_a_shell():
    ((_, command),) = curl.lines(Target(URL, "it's", "m'x", CacheMode.MERGED), True)
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:3] == ["curl", "-N", f"{URL}/v1/chat/completions"]
    assert "Authorization: Bearer it's" in words
    assert "X-Cache-Mode: merged" in words
    assert json.loads(words[-1])["model"] == "m'x"
    ((title, hidden),) = curl.lines(TARGET, False)
    assert TARGET.key not in hidden
    assert '"Authorization: Bearer $KVGATE_KEY"' in hidden
    assert "KVGATE_KEY" in title


# ------------------------------------------------------------------------------------------------- choosing and masking


@pytest.mark.parametrize(
    ("said", "host", "url"),
    [
        (None, "127.0.0.1", "http://127.0.0.1:8000"),
        (None, "0.0.0.0", "http://127.0.0.1:8000"),
        (None, "::1", "http://[::1]:8000"),
        ("http://h:1/v1/", "x", "http://h:1"),
        ("http://h:1/split/v1", "x", "http://h:1"),
        ("https://h/gate/merged", "x", "https://h/gate"),
    ],
)
def test_the_address_is_the_gateways_own(said: str | None, host: str, url: str):
    assert gateway_url(said, Settings(server=ServerSettings(host=host))) == url


def test_a_bad_address_is_refused():
    with pytest.raises(SettingsError, match="--url"):
        gateway_url("localhost:8000", Settings())
    with pytest.raises(SettingsError, match="any free port"):
        gateway_url(None, Settings(server=ServerSettings(port=0)))


def test_the_key_is_the_first_that_fits_the_mode():
    keys = (
        KeySettings(key="sk-m", name="m", mode=CacheMode.MERGED),
        KeySettings(key="sk-any", name="any"),
    )
    settings = Settings(keys=keys)
    assert key_for(None, None, settings, CacheMode.SPLIT) == "sk-any"
    assert key_for(None, None, settings, CacheMode.MERGED) == "sk-m"
    assert key_for("said", "env", settings, None) == "said"
    assert key_for(None, "env", settings, None) == "env"
    assert key_for(None, None, Settings(), None) == "local"


def test_limits_come_from_the_gateway_else_from_the_settings_with_a_note():
    served = Served({"big": 32_768, "big:split": 32_768})
    target, notes = target_for(Said(), Settings(), url=URL, key="k", served=served)
    assert (target.model, target.limits, notes) == ("big", Limits(32_768, 4096), [])
    target, notes = target_for(Said(model="nope"), Settings(), url=URL, key="k", served=served)
    assert target.limits is None
    assert "'nope'" in notes[0]
    engine = EngineSettings(model="smollm2", max_model_len=4096)
    target, notes = target_for(Said(), Settings(engine=engine), url=URL, key="k", served=Served({}, "no gateway"))
    assert (target.model, target.limits) == ("smollm2", Limits(4096, 1024))
    assert len(notes) == 2
    upstream = Settings(server=ServerSettings(api_base="http://h/v1", model="gpt"))
    target, _ = target_for(Said(), upstream, url=URL, key="k", served=Served({}, "no gateway"))
    assert (target.model, target.limits) == ("gpt", None)


def test_a_list_of_models_is_read_or_its_fault_is_said():
    assert parse(b'{"data":[{"id":"a","max_model_len":10},{"id":"b"}]}').models == {"a": 10, "b": None}
    for body in (b"", b"<html>", b"[]", b'{"data":3}', b'{"data":[1]}'):
        assert parse(body).problem


def test_limits_leave_room_for_the_question():
    assert limits_of(8192) == Limits(8192, 2048)
    assert limits_of(200_000).output == 4096
    assert limits_of(200_000, 100).output == 100
    assert limits_of(16).output >= 1


def test_a_key_is_masked_unless_it_is_no_secret():
    assert masked("a sk-key-0123456789 b", "sk-key-0123456789") == "a sk-…789 b"
    assert masked("key local", "local") == "key local"
    assert mask("short") == "***"


# ------------------------------------------------------------------------------------------------------ header lists


def test_one_header_of_several_is_set_and_the_others_stay():
    assert with_header("", "X-A", "1", "\n") == "X-A: 1"
    assert with_header("Y: 2\nx-a: 0\nZ: 3", "X-A", "1", "\n") == "Y: 2\nX-A: 1\nZ: 3"
    assert with_header("Y:2,X-A:1", "X-A", None, ",") == "Y:2"
    assert with_header("Y:2", "X-A", "1", ",") == "Y:2,X-A:1"
    assert split_headers("Y: 2\nbroken\nX-A:1", "\n") == {"Y": "2", "X-A": "1"}


def test_every_format_has_a_client():
    assert {client.format for client in FILE_CLIENTS.values()} == set(Format)
