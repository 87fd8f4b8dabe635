"""Each accepted shape of settings file, and that all of them mean the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.core.types import CacheMode
from gateway.settings.importers import LoadedSettings, Shape, find_settings_file, load_settings
from gateway.settings.schema import Settings

LAYOUT_FORM = """\
[server]
host = "127.0.0.1"
port = 8001
api_base = "https://taotoken.net/api"     # the unified upstream
api_key = "sk-test-000000"
model = "a-model"

[cache_layout]
mode = "disaggregated"
prefill_gpus = [0]
decode_gpus = [1]
merged_gpus = [0, 1]

[kv_cache]
block_size = 32
gpu_memory_utilization = 0.91
decode_kv_limit_gb = 40
prefill_chunk_tokens = 1024

[scheduler]
prefill_token_ratio = 0.5
prefill_max_batch = 4
decode_max_batch = 32
enable_prefix_cache = false

[transfer]
kv_transfer_mode = "request"
backend = "local"
"""

CLINE_FLAT = """\
{
  // a comment
  "editor.fontSize": 14,
  "cline.apiProvider": "openai-compatible",
  "cline.openAiBaseUrl": "https://taotoken.net/api",
  "cline.openAiApiKey": "sk-test-000000", /* another */
  "cline.openAiModelId": "a-model",
  "cline.requestOptions": {"temperature": 0.2, "maxTokens": 2048, "stream": true},
  "cline.cacheStrategy": {
    "mode": "split", "chunkSize": 512, "kvCacheDtype": "fp16", "enablePrefixCache": false,
    "prefillEndpoint": "https://taotoken.net/api", "decodeEndpoint": "https://taotoken.net/api",
    "kvTransferProtocol": "request-wise",
  },
}
"""

CLINE_NESTED = """\
{"cline": {
  "apiProvider": "openai",
  "openAiBaseUrl": "https://taotoken.net/api", "openAiApiKey": "sk-test-000000", "openAiModelId": "a-model",
  "requestOptions": {"temperature": 0.2, "maxTokens": 2048, "stream": true},
  "cacheStrategy": {"mode": "split", "chunkSize": 512, "kvCacheDtype": "float16", "enablePrefixCache": false,
    "prefillEndpoint": "https://taotoken.net/api", "decodeEndpoint": "https://taotoken.net/api",
    "kvTransferProtocol": "request-wise"}}}
"""

CLINE_DOTTED = """\
{"cline.openAiBaseUrl": "https://taotoken.net/api", "cline.openAiApiKey": "sk-test-000000",
 "cline.openAiModelId": "a-model", "cline.requestOptions.temperature": 0.2, "cline.requestOptions.maxTokens": 2048,
 "cline.requestOptions": {"stream": true}, "cline.cacheStrategy.mode": "pd", "cline.cacheStrategy.chunkSize": 512,
 "cline.cacheStrategy.kvCacheDtype": "half", "cline.cacheStrategy.enablePrefixCache": false,
 "cline.cacheStrategy.prefillEndpoint": "https://taotoken.net/api/",
 "cline.cacheStrategy.decodeEndpoint": "https://taotoken.net/api", "cline.cacheStrategy.kvTransferProtocol": "request"}
"""

PROVIDER_FORM = """\
[provider]
name = "upstream"
base_url = "https://taotoken.net/api"
api_key = "sk-test-000000"
model = "a-model"
[cache]
mode = "split"
chunk_size = 512
kv_cache_dtype = "fp16"
prefix_cache = false
[cache.split]
prefill_base_url = "https://taotoken.net/api"
decode_base_url = "https://taotoken.net/api"
transfer_protocol = "request-wise"
[request]
temperature = 0.2
max_tokens = 2048
stream = true
"""


def load(text: str, folder: Path, **environ: str) -> LoadedSettings:
    path = folder / "settings"
    path.write_text(text, encoding="utf-8")
    return load_settings(path, environ=environ)


def test_every_field_of_the_layout_form_arrives(tmp_path):
    loaded = load(LAYOUT_FORM, tmp_path)
    settings = loaded.settings
    assert loaded.shape is Shape.NATIVE
    assert (settings.server.port, settings.server.api_base) == (8001, "https://taotoken.net/api")
    assert settings.server.api_key is not None
    assert settings.server.api_key.get_secret_value() == "sk-test-000000"
    assert settings.server.model == "a-model"
    assert settings.cache_layout.mode is CacheMode.SPLIT
    assert settings.cache_layout.prefill_gpus == (0,)
    assert settings.cache_layout.decode_gpus == (1,)
    assert settings.cache_layout.merged_gpus == (0, 1)
    assert settings.kv_cache.block_size == 32
    assert settings.kv_cache.gpu_memory_utilization == 0.91
    assert settings.kv_cache.decode_kv_limit_gb == 40
    assert settings.kv_cache.prefill_chunk_tokens == 1024
    assert settings.scheduler.prefill_token_ratio == 0.5
    assert (settings.scheduler.prefill_max_batch, settings.scheduler.decode_max_batch) == (4, 32)
    assert settings.scheduler.enable_prefix_cache is False
    assert settings.transfer.kv_transfer_mode == "request"


@pytest.mark.parametrize("text", [CLINE_FLAT, CLINE_NESTED, CLINE_DOTTED, PROVIDER_FORM])
def test_editor_and_provider_forms_mean_the_same(tmp_path, text):
    settings = load(text, tmp_path).settings
    expected = {
        "server": {
            "api_base": "https://taotoken.net/api",
            "api_key": "sk-test-000000",
            "model": "a-model",
        },
        "cache_layout": {
            "mode": "split",
            "chunk_size": 512,
            "enable_prefix_cache": False,
            "prefill_endpoint": "https://taotoken.net/api",
            "decode_endpoint": "https://taotoken.net/api",
        },
        "kv_cache": {"kv_cache_dtype": "fp16"},
        "transfer": {"kv_transfer_mode": "request"},
        "request": {"temperature": 0.2, "max_tokens": 2048, "stream": True},
    }
    assert settings == Settings.model_validate(expected)


@pytest.mark.parametrize(
    ("text", "shape"),
    [(LAYOUT_FORM, Shape.NATIVE), (CLINE_FLAT, Shape.CLINE), (PROVIDER_FORM, Shape.CC_SWITCH)],
)
@pytest.mark.parametrize("change", [lambda t: "\ufeff" + t, lambda t: t.replace("\n", "\r\n"), str.rstrip])
def test_cf_01_byte_order_mark_line_ends_and_last_newline_do_not_matter(tmp_path, text, shape, change):
    path = tmp_path / "settings"
    path.write_bytes(text.encode())
    plain = load_settings(path, environ={})
    path.write_bytes(change(text).encode())
    changed = load_settings(path, environ={})
    assert changed.shape is shape
    assert changed.settings == plain.settings


def test_provider_form_takes_its_other_fields_and_native_tables(tmp_path):
    text = PROVIDER_FORM.replace("stream = true", "stream = true\ntimeout_seconds = 120")
    text += '[engine]\nmodel = "smollm2"\n[[keys]]\nname = "a"\nkey = "sk-a"\n'
    text = text.replace('transfer_protocol = "request-wise"', "max_transfer_concurrency = 8")
    settings = load(text, tmp_path).settings
    assert settings.request.timeout_seconds == 120
    assert settings.transfer.max_transfer_concurrency == 8
    assert settings.engine is not None
    assert [key.name for key in settings.keys] == ["a"]


def test_a_mode_alone_is_a_cache_strategy(tmp_path):
    text = '{"cline.openAiBaseUrl": "http://h/v1", "cline.cacheStrategy": "split"}'
    assert load(text, tmp_path).settings.cache_layout.mode is CacheMode.SPLIT


@pytest.mark.parametrize(
    ("spelling", "mode"),
    [
        ("split", "split"),
        (" Disaggregated ", "split"),
        ("PD", "split"),
        ("merged", "merged"),
        ("Chunked", "merged"),
        ("COLOCATED", "merged"),
    ],
)
def test_modes_may_be_spelt_as_the_field_does(tmp_path, spelling, mode):
    text = f'[cache_layout]\nmode = "{spelling}"\n[[keys]]\nname="a"\nkey="sk"\nmode="{spelling}"\n'
    text += f'[engine]\nmodes = ["{spelling}"]\n'
    settings = load(text, tmp_path).settings
    assert settings.cache_layout.mode == mode
    assert settings.keys[0].mode == mode
    assert settings.engine is not None
    assert settings.engine.modes == (mode,)


def test_lists_of_tables_keep_their_order(tmp_path):
    text = "".join(f'[[targets]]\nname="t{i}"\nbase_url="http://h{i}"\n' for i in range(12))
    assert [target.name for target in load(text, tmp_path).settings.targets] == [f"t{i}" for i in range(12)]


def test_without_a_file_the_bundled_engine_runs_alone():
    loaded = load_settings(None, environ={})
    assert loaded.shape is Shape.NONE
    assert loaded.settings == Settings()
    assert loaded.notices == ()
    engine = loaded.settings.effective_engine()
    assert engine is not None
    assert engine.public_name() == "smollm2"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("/models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("./a/b.gguf", "b"),
        ("C:\\models\\m", "m"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B:refs/pr/1", "Qwen3-0.6B"),
        ("x.gguf", "x"),
    ],
)
def test_the_engine_is_known_by_its_bundled_or_folder_name(tmp_path, model, name):
    engine = load(f"[engine]\nmodel = '{model}'\n", tmp_path).settings.engine
    assert engine is not None
    assert engine.public_name() == name


def test_an_empty_engine_table_turns_the_engine_on(tmp_path):
    settings = load('[server]\napi_base = "http://h"\n[engine]\n', tmp_path).settings
    assert settings.effective_engine() is not None


def test_the_file_is_found_by_variable_then_in_the_folder(tmp_path):
    assert find_settings_file({}, tmp_path) is None
    (tmp_path / "kvgate.toml").write_text("")
    assert find_settings_file({}, tmp_path) == tmp_path / "kvgate.toml"
    assert find_settings_file({"KVGATE_CONFIG": "/x.toml"}, tmp_path) == Path("/x.toml")
