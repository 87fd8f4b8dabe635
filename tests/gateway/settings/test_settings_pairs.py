"""[[pairs]]: what is refused before anything starts, and what each mode says of itself."""

from __future__ import annotations

import pytest

from gateway.settings.errors import SettingsError
from gateway.settings.importers import LoadedSettings, load_settings
from gateway.settings.layout import kinds
from gateway.settings.schema import public_dump, secrets_of

PAIR = '[[pairs]]\nname = "p"\nengine = "vllm"\n'
BOTH = 'prefill = ["http://a:8000"]\ndecode = ["http://b:8000"]\n'
SPLIT = '[cache_layout]\nmode = "split"\n'


def load(tmp_path, text: str) -> LoadedSettings:
    path = tmp_path / "k.toml"
    path.write_text(text)
    return load_settings(path, environ={})


def problems(tmp_path, text: str) -> str:
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, text)
    return "\n".join(refused.value.problems)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PAIR, "there are no servers"),
        (PAIR + 'prefill = ["http://a"]', "there is no decode server"),
        (PAIR + 'decode = ["http://a"]', "there is no prefill server"),
        (PAIR + 'prefill = ["http://a:1", "http://a:1/v1"]\ndecode = ["http://b"]', "named twice"),
        (PAIR + BOTH.replace("vllm", "none") + "engine2 = 1", "unknown setting"),
        (
            PAIR.replace("vllm", "dynamo") + BOTH,
            "must be one of vllm, vllm-mooncake, sglang, llm-d, tensorrt-llm, store",
        ),
        (PAIR + 'prefill = ["ftp://a"]\ndecode = ["http://b"]', "must start with http"),
        (PAIR + 'prefill = ["http://127.0.0.1:8000"]\ndecode = ["http://b"]', "is this gateway itself"),
        (PAIR + BOTH + PAIR + BOTH, "the name 'p' is given to two targets"),
        (PAIR + BOTH, "the default mode is merged, but [[pairs]] have servers only for split"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path, text, words):
    assert words in problems(tmp_path, text)


@pytest.mark.parametrize(
    "decode",
    ["http://a:8100", "http://A:8100/v1/", "http://a:8100/v1/chat/completions"],
    ids=["same", "v1", "endpoint"],
)
def test_the_same_server_on_both_sides_is_refused_and_merged_advised(tmp_path, decode):
    said = problems(tmp_path, SPLIT + PAIR + f'prefill = ["http://a:8100"]\ndecode = ["{decode}"]')
    assert "one instance" in said
    assert "merged is the mode" in said


def test_every_name_of_this_host_is_the_same_server(tmp_path):
    said = problems(tmp_path, SPLIT + PAIR + 'prefill = ["http://localhost:8100"]\ndecode = ["http://[::1]:8100"]')
    assert "one instance" in said


def test_two_endpoints_of_the_layout_point_to_pairs(tmp_path):
    text = SPLIT + 'prefill_endpoint = "http://a"\ndecode_endpoint = "http://b"\n[server]\napi_base = "http://c"'
    assert "[[pairs]]" in problems(tmp_path, text)


def test_pd_13_each_mode_says_what_serves_it(tmp_path):
    settings = load(tmp_path, PAIR + BOTH + 'merged = ["http://c", "http://d"]').settings
    assert kinds(settings) == {"merged": "p (vllm): 2 merged", "split": "p (vllm): 1 prefill + 1 decode"}
    assert settings.effective_engine() is None


def test_a_bootstrap_port_without_a_bootstrap_service_is_said(tmp_path):
    notices = load(tmp_path, SPLIT + PAIR + BOTH + "bootstrap_port = 8998").notices
    assert any("bootstrap_port" in notice and "no effect" in notice for notice in notices)
    quiet = load(tmp_path, SPLIT + PAIR.replace("vllm", "sglang") + BOTH + "bootstrap_port = 8998").notices
    assert not quiet


def test_the_servers_key_is_kept(tmp_path):
    settings = load(tmp_path, SPLIT + PAIR + BOTH + 'api_key = "sk-servers"').settings
    assert secrets_of(settings) == ("sk-servers",)
    assert "sk-servers" not in str(public_dump(settings))
