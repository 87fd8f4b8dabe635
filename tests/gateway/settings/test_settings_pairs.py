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


def test_the_servers_key_may_be_in_a_file_and_is_nowhere_shown(tmp_path):
    file = tmp_path / "pair.key"
    file.write_text("sk-pair-0123456789\n")
    file.chmod(0o600)
    loaded = load(tmp_path, SPLIT + PAIR + BOTH + 'api_key_file = "pair.key"')
    key = loaded.settings.pairs[0].api_key
    assert key is not None
    assert key.get_secret_value() == "sk-pair-0123456789"
    assert file in loaded.files
    assert secrets_of(loaded.settings) == ("sk-pair-0123456789",)
    shown = public_dump(loaded.settings)["pairs"][0]
    assert (shown["api_key"], shown["api_key_file"]) == ("***", "pair.key")
    assert "sk-pair" not in repr(loaded.settings)
    file.write_text("sk-pair-new-0123456789\n")
    assert load(tmp_path, SPLIT + PAIR + BOTH + 'api_key_file = "pair.key"').settings.pairs != loaded.settings.pairs


def test_a_key_file_that_is_missing_or_beside_a_key_is_refused(tmp_path):
    missing = problems(tmp_path, SPLIT + PAIR + BOTH + 'api_key_file = "none.key"')
    assert "pairs[0].api_key_file (k.toml, line 8)" in missing
    assert "none.key: the key file does not exist" in missing
    (tmp_path / "pair.key").write_text("sk-pair-0123456789\n")
    both = problems(tmp_path, SPLIT + PAIR + BOTH + 'api_key = "sk-other-0123"\napi_key_file = "pair.key"')
    assert "gives the same key" in both
    assert "sk-" not in both


SAME = [
    "localhost",
    "127.0.0.1",
    "127.0.0.9",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]",
    "0.0.0.0",
    "LOCALHOST.",
]


@pytest.mark.parametrize(
    "other", [f"http://{host}:8100" for host in SAME] + ["http://localhost:8100/", "http://localhost:8100/v1"]
)
def test_one_instance_is_refused_by_whatever_name_it_is_given_twice(tmp_path, other):
    two_sides = problems(tmp_path, SPLIT + PAIR + f'prefill = ["http://localhost:8100"]\ndecode = ["{other}"]')
    assert "one instance" in two_sides
    one_side = problems(tmp_path, PAIR + f'merged = ["http://127.0.0.1:8100", "{other}"]')
    assert "a server is named twice" in one_side


def test_spellings_of_one_far_address_are_one_and_ports_and_paths_are_not(tmp_path):
    urls = 'prefill = ["http://[2001:db8::1]:80"]\ndecode = ["http://[2001:0DB8:0:0::1]"]'
    assert "one instance" in problems(tmp_path, SPLIT + PAIR + urls)
    for other in ("http://localhost:8101", "http://localhost:8100/b", "http://h:8100"):
        urls = f'prefill = ["http://localhost:8100/a"]\ndecode = ["{other}"]'
        assert load(tmp_path, SPLIT + PAIR + urls).settings.pairs


def test_a_far_decode_server_that_is_told_to_look_at_itself_for_kv_is_worth_a_notice(tmp_path):
    urls = 'prefill = ["http://127.0.0.1:30000"]\ndecode = ["http://far:30000"]\n'
    for engine, is_told in (("sglang", True), ("vllm-mooncake", True), ("llm-d", True), ("vllm", False)):
        notices = load(tmp_path, SPLIT + PAIR.replace("vllm", engine) + urls).notices
        assert any("leads it to its own host" in notice for notice in notices) is is_told
