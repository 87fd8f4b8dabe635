"""What settings mean together: refusals and notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.settings.checks import is_loopback
from gateway.settings.errors import SettingsError
from gateway.settings.importers import LoadedSettings, load_settings

UPSTREAM = '[server]\napi_base = "https://taotoken.net/api"\n'
ENGINE = "[engine]\n"
PAIR = '[cache_layout]\nprefill_endpoint = "{}"\ndecode_endpoint = "{}"\n'


def load(text: str, folder: Path) -> LoadedSettings:
    path = folder / "file"
    path.write_text(text)
    return load_settings(path, environ={})


def refused(text: str, folder: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        load(text, folder)
    return str(caught.value)


def notices(text: str, folder: Path) -> str:
    return "\n".join(load(text, folder).notices)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gateway.lan"])
def test_an_address_others_can_reach_needs_a_key(tmp_path, host):
    text = f'[server]\nhost = "{host}"\n'
    assert "server.host (file, line 2)" in refused(text, tmp_path)
    assert load(text + '[[keys]]\nname = "a"\nkey = "sk-a"\n', tmp_path).settings.server.host == host


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("LOCALHOST.", True),
     ("0.0.0.0", False), ("::", False), ("localhost.example", False), ("128.0.0.1", False), ("::ffff:1.2.3.4", False)],
)  # fmt: skip
def test_loopback_is_told_from_other_addresses(host, loopback):
    assert is_loopback(host) is loopback


def test_both_endpoints_at_the_unified_upstream_are_accepted_and_explained(tmp_path):
    text = UPSTREAM + PAIR.format("https://taotoken.net/api/", "HTTPS://Taotoken.net/api")
    loaded = load(text, tmp_path)
    assert loaded.settings.cache_layout.prefill_endpoint == "https://taotoken.net/api"
    assert "splits by itself and is told the mode by X-Cache-Mode" in loaded.notices[-1]


@pytest.mark.parametrize("base", ["", UPSTREAM])
def test_two_endpoints_that_are_one_other_instance_are_refused(tmp_path, base):
    message = refused(base + PAIR.format("http://h:1/v1", "http://h:1/v1"), tmp_path)
    assert "one instance" in message
    assert "merged is the mode" in message


def test_two_endpoints_without_a_protocol_are_refused_with_the_table_for_them(tmp_path):
    message = refused(UPSTREAM + PAIR.format("http://h:1/v1", "http://h:2/v1"), tmp_path)
    assert "[[pairs]] with their engine" in message


def test_one_endpoint_alone_is_refused(tmp_path):
    assert "needed together" in refused('[cache_layout]\ndecode_endpoint = "http://h"\n', tmp_path)


def test_the_provider_form_has_the_same_refusals_under_its_own_names(tmp_path):
    text = (
        '[provider]\nbase_url = "http://a"\n[cache.split]\nprefill_base_url = "http://b"\ndecode_base_url = "http://b"'
    )
    assert "cache.split.prefill_base_url (file, line 4)" in refused(text, tmp_path)


def test_an_upstream_that_is_this_gateway_is_refused(tmp_path):
    assert "this gateway itself" in refused('[server]\nport = 8000\napi_base = "http://localhost:8000/v1"\n', tmp_path)
    assert load('[server]\nport = 8001\napi_base = "http://localhost:8000/v1"\n', tmp_path)


def test_names_and_keys_must_differ_and_routes_must_lead_somewhere(tmp_path):
    target = '[[targets]]\nname = "{}"\nbase_url = "http://h"\n'
    assert "targets[0].name (file, line 3)" in refused(ENGINE + target.format("Local"), tmp_path)
    keys = '[[keys]]\nname="a"\nkey="k"\n[[keys]]\nname="{}"\nkey="{}"\n'
    assert "keys[1].key (file, line 6)" in refused(keys.format("b", "k"), tmp_path)
    assert "keys[1].name (file, line 5)" in refused(keys.format("a", "l"), tmp_path)
    message = refused('[[routes]]\nmodel = "a"\ntarget = "nowhere"\n', tmp_path)
    assert "routes[0].target (file, line 3)" in message
    assert "targets: local" in message


def test_a_route_cannot_rename_the_local_model(tmp_path):
    text = '[[routes]]\nmodel = "gpt-*"\ntarget = "local"\nupstream_model = "{}"\n'
    assert "serves 'smollm2' and no other" in refused(text.format("other"), tmp_path)
    assert load(text.format("smollm2"), tmp_path)


def test_too_high_a_share_of_memory_is_warned_about(tmp_path):
    text = ENGINE + "[kv_cache]\ngpu_memory_utilization = {}\n"
    assert "0.85 to 0.92 is advised" in notices(text.format(0.93), tmp_path)
    assert notices(text.format(0.92), tmp_path) == ""


@pytest.mark.parametrize(
    ("given", "used", "parts"),
    [(500, 512, ["500 is not a multiple of 64: 512 is used"]), (64, 64, ["64 is below 128"]), (1, 64, ["64", "below"]),
     (512, 512, []), (1000, 1024, ["1024"])],
)  # fmt: skip
def test_chunk_sizes_are_multiples_of_64_and_not_tiny(tmp_path, given, used, parts):
    loaded = load(f"[cache_layout]\nchunk_size = {given}\n", tmp_path)
    assert loaded.settings.cache_layout.chunk_size == used
    assert all(part in "\n".join(loaded.notices) for part in parts)
    assert bool(loaded.notices) == bool(parts)


def test_a_chunk_size_in_split_is_said_to_have_no_effect(tmp_path):
    text = '[cache]\nmode = "split"\nchunk_size = 512\n'
    assert "cache.chunk_size (file, line 3): no effect in split" in notices(text, tmp_path)


def test_one_device_for_both_sides_is_noticed(tmp_path):
    text = ENGINE + "[cache_layout]\nprefill_gpus = [1]\ndecode_gpus = [{}]\n"
    assert "both on device 1" in notices(text.format(1), tmp_path)
    assert notices(text.format(0), tmp_path) == ""


def test_a_device_that_is_named_twice_is_noticed(tmp_path):
    text = ENGINE + "[cache_layout]\nprefill_gpus = [0, 2]\ndecode_gpus = [1]\nmerged_gpus = [1, 1]\n"
    message = notices(text, tmp_path)
    assert "cache_layout.merged_gpus (file, line 5): a device is named twice and gets two instances" in message
    assert "prefill_gpus" not in message


def test_devices_on_a_cpu_are_said_to_be_labels(tmp_path):
    text = '[engine]\ndevice = "cpu"\n[cache_layout]\nprefill_gpus = [1]\ndecode_gpus = [1, 1]\n'
    message = notices(text, tmp_path)
    assert "prefill_gpus, decode_gpus: engine.device is cpu, so the numbers are labels: each is one instance" in message
    assert "both on device" not in message  # another label would change nothing
    assert "named twice" not in message


@pytest.mark.parametrize(
    ("layout", "backend", "said"),
    [
        ("merged_gpus = [0, 0]", "local", "cache_layout.merged_gpus (file, line 4): merged would have two instances"),
        (
            "prefill_gpus = [1]\ndecode_gpus = [0, 1]",
            "cuda_ipc",
            "decode and prefill would have two instances on CUDA ",
        ),
        ("", "nixl", "on CUDA device 0, and the first to start leaves no memory for the other"),
    ],
)
def test_two_instances_on_one_cuda_device_are_refused_unless_their_pools_are_limited(tmp_path, layout, backend, said):
    text = f'[engine]\ndevice = "cuda"\n[cache_layout]\n{layout}\n[transfer]\nbackend = "{backend}"\n'
    assert said in refused(text, tmp_path)
    assert load(text + "[kv_cache]\nkv_cache_gib = 4\n", tmp_path)


def test_instances_on_devices_of_their_own_are_no_problem(tmp_path):
    text = '[engine]\ndevice = "cuda"\n[transfer]\nbackend = "cuda_ipc"\n[cache_layout]\n'
    assert notices(text + "prefill_gpus = [0, 1]\ndecode_gpus = [2, 3]\nmerged_gpus = [4, 5]\n", tmp_path) == ""


def test_a_way_between_cuda_devices_is_refused_on_a_cpu(tmp_path):
    text = '[engine]\ndevice = "cpu"\n[transfer]\nbackend = "{}"\n'
    assert "transfer.backend (file, line 4): cuda_ipc moves KV between CUDA devices" in refused(
        text.format("cuda_ipc"), tmp_path
    )
    assert load(text.format("nixl"), tmp_path).settings.transfer.backend == "nixl"


@pytest.mark.parametrize(
    ("given", "meant"), [("NIXL", "nixl"), ("cuda-ipc", "cuda_ipc"), ("shared_memory", "local"), ("shm", "local")]
)
def test_transfer_backends_have_spellings(tmp_path, given, meant):
    text = f'[transfer]\nbackend = "{given}"\n[kv_cache]\nkv_cache_gib = 1\n'
    assert load(text, tmp_path).settings.transfer.backend == meant


@pytest.mark.parametrize(
    "text",
    [
        '[provider]\nbase_url = "http://h"\n[cache.split]\ntransfer_protocol = "nixl"\n',
        '{"cline.openAiBaseUrl": "http://h", "cline.cacheStrategy": {"kvTransferProtocol": "NIXL"}}',
        '[transfer]\nkv_transfer_mode = "nixl"\n',
    ],
    ids=["cc switch", "cline", "native"],
)
def test_a_backend_in_the_place_of_a_transfer_mode_is_refused_with_where_it_belongs(tmp_path, text):
    message = refused(text, tmp_path)
    assert "must be layer (layer-wise) or request (request-wise)" in message
    assert "the backend nixl is chosen in the gateway's settings, by transfer.backend" in message


def test_a_transfer_mode_in_the_place_of_a_backend_is_refused_with_where_it_belongs(tmp_path):
    message = refused('[transfer]\nbackend = "layer-wise"\n', tmp_path)
    assert "must be local (shared memory), nixl or cuda_ipc; layer is a transfer mode" in message
    assert "transfer.kv_transfer_mode" in message


def test_the_other_shapes_take_the_backend_from_the_native_table(tmp_path):
    text = '[provider]\nbase_url = "http://h"\n[transfer]\nbackend = "nixl"\n[engine]\nmodel = "smollm2"\n'
    assert load(text, tmp_path).settings.transfer.backend == "nixl"
    wrong = '[provider]\nbase_url = "http://h"\n[cache.split]\ntransfer_backend = "nixl"\n'
    assert "unknown setting in [cache.split]" in refused(wrong, tmp_path)


def test_a_limit_that_an_exact_size_overrules_is_said(tmp_path):
    text = ENGINE + "[kv_cache]\nnum_kv_blocks = 5\ndecode_kv_limit_gb = 4\n"
    assert "kv_cache.decode_kv_limit_gb (file, line 4): no effect" in notices(text, tmp_path)


def test_engine_variants_that_can_not_help_are_noticed(tmp_path):
    text = '[engine]\ndevice = "{}"\nkv_cache_variants = ["fp16", "bf16"]\n[kv_cache]\nkv_cache_dtype = "{}"\n'
    assert notices(text.format("cpu", "fp32"), tmp_path) == ""
    same = notices(text.format("cpu", "fp16"), tmp_path)
    assert "engine.kv_cache_variants (file, line 3): fp16 is never started" in same
    assert "leaves no memory for a variant" in notices(text.format("auto", "fp32"), tmp_path)
    assert notices(text.format("auto", "fp32") + "kv_cache_gib = 2\n", tmp_path) == ""


def test_an_unknown_or_repeated_variant_is_refused(tmp_path):
    text = "[engine]\nkv_cache_variants = {}\n"
    assert "each item one of fp32, fp16, bf16, int8" in refused(text.format('["auto"]'), tmp_path)
    assert "fp16 is named twice" in refused(text.format('["fp16", "fp16"]'), tmp_path)


def test_engine_options_without_an_engine_get_one_notice_that_says_how_to_start_it(tmp_path):
    text = UPSTREAM + "[kv_cache]\nblock_size = 16\n[scheduler]\nmax_waiting = 1\n[cache_layout]\ndecode_gpus = [0]\n"
    (notice,) = load(text, tmp_path).notices
    assert all(name in notice for name in ("kv_cache.block_size", "scheduler.max_waiting", "decode_gpus", "[engine]"))
    assert load(text + ENGINE, tmp_path).notices == ()


def test_a_switched_off_engine_is_said_to_be_switched_off(tmp_path):
    text = "[engine]\nenabled = false\n[scheduler]\nmax_waiting = 1\n"
    assert "engine.enabled = true" in notices(text, tmp_path)


def test_a_dtype_of_other_engines_has_no_effect_at_an_upstream(tmp_path):
    text = '[provider]\nbase_url = "http://h"\n[cache]\nkv_cache_dtype = "fp8"\n'
    assert "fp8 has no effect" in notices(text, tmp_path)
    assert "bundled engine's: auto, fp32" in refused(text + ENGINE, tmp_path)


def test_keys_that_nothing_uses_are_noticed(tmp_path):
    assert "not used" in notices('[server]\napi_key = "sk-a"\n', tmp_path)
    assert "no effect" in notices(UPSTREAM + 'api_key = "sk-a"\nforward_client_key = true\n', tmp_path)
    assert "placeholder" in notices(UPSTREAM + 'api_key = "sk-your-taotoken-key"\n', tmp_path)


def test_a_default_mode_that_the_only_engine_does_not_run_is_refused(tmp_path):
    only_split = '[engine]\nmodes = ["split"]\n'
    assert "the default mode is merged, but engine.modes has only split" in refused(only_split, tmp_path)
    assert load(only_split + '[cache_layout]\nmode = "split"\n', tmp_path).settings.engine
    assert load(UPSTREAM + only_split, tmp_path).settings.engine


def test_an_engine_without_modes_is_refused(tmp_path):
    assert "engine.modes (file, line 2): is empty; give merged, split or both" in refused(
        "[engine]\nmodes = []\n", tmp_path
    )


def test_toml_nested_too_deeply_is_refused(tmp_path):
    assert "nested too deeply" in refused("a = " + "[" * 5000 + "]" * 5000, tmp_path)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[[targets]]\nname = "a"\nbase_url = "http://h"\ndialects = []\n', "targets[0].dialects (file, line 4)"),
        ('[server]\napi_base = "http://h"\napi_dialects = []\n', "server.api_dialects (file, line 3)"),
    ],
)
def test_a_target_that_speaks_nothing_is_refused(tmp_path, text, place):
    assert f"{place}: is empty" in refused(text, tmp_path)


def test_a_gateway_that_serves_nothing_is_remarked(tmp_path):
    off = "[engine]\nenabled = false\n"
    assert "engine.enabled (file, line 2): nothing is served" in notices(off, tmp_path)
    assert "nothing is served" not in notices(off + UPSTREAM, tmp_path)


def test_the_default_mode_that_pairs_need_is_named(tmp_path):
    pair = '[[pairs]]\nname = "p"\nengine = "vllm"\nprefill = ["http://a:1"]\ndecode = ["http://b:1"]\n'
    assert refused(pair, tmp_path).endswith("Set it to split")
