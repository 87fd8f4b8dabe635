"""What is refused, and that each refusal names the setting, the line and what to write instead."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gateway.settings.errors import SettingsError
from gateway.settings.importers import load_settings


def problems(text: str | bytes, folder: Path, **environ: str) -> str:
    path = folder / "file"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError) as caught:
        load_settings(path, environ=environ)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[server]\n\nprot = 1", ["server.prot (file, line 3)", "did you mean port?"]),
        (
            "[server]\ncachestrategy = 1",
            ["line 2", "unknown setting in [server]", "did you mean mode in [cache_layout]?"],
        ),
        ('cacheStrategy = "split"', ["line 1", "outside any table", "did you mean mode in [cache_layout]?"]),
        ('[engine]\ncache_mode = "split"', ["line 2", "did you mean mode in [cache_layout]?"]),
        ('[provider]\n[cache]\ncache_mode = "split"', ["line 3", "did you mean mode in [cache]?"]),
        ("[cache-strategy]\na = 1", ["unknown table [cache-strategy]"]),
        ("[server]\nblock_size = 16", ["line 2", "it belongs in [kv_cache]"]),
        ("port = 1\n", ["port (file, line 1)", "it belongs in [server]"]),
        ("[kv_cach]\nblock_size = 1", ["unknown table [kv_cach]", "it belongs in [kv_cache]"]),
        ("[kv_cach]\n", ["kv_cach (file, line 1)", "did you mean kv_cache?"]),
        ("[server.tls]\ncert = 1", ["server.tls.cert (file, line 2)", "unknown setting in [server]"]),
        ("[server.port]\na = 1", ["is an option, not a table"]),
        ("server = 5", ["must be a table, written [server]"]),
        ("keys = 5", ["written [[keys]]"]),
        ('[keys]\nname = "x"', ["must be a list of tables, each written [[keys]]"]),
        ('[[keys]]\nname="x"\nkey="y"\n[[keys]]\nname="z"\nkeys="y"', ["keys[1].keys (file, line 6)", "key?"]),
        (
            '[[keys]]\nnam="x"\n[[keys]]\nname="z"\nkey="y"\nmodels="m"',
            ["keys[0].nam (file, line 2)", "keys[1].models (file, line 6)"],
        ),
        ("[provider]\nbase_ur = 1", ["line 2", "did you mean base_url?"]),
        ("[cache.split]\nchunk_size = 1", ["it belongs in [cache]"]),
        ("[cache]\nopenAiBaseUrl = 1", ["cache.openAiBaseUrl (file, line 2)"]),
        ('{"cline.openAiBaseUr": 1}', ["cline.openAiBaseUr (file, line 1)", "did you mean cline.openAiBaseUrl?"]),
        (
            '{\n"cline": {\n"cacheStrategy": {"chunksize": 1}}}',
            ["cline.cacheStrategy.chunksize (file, line 3)", "chunkSize"],
        ),
        ('{"cline.apiProvider": "other"}', ["must be openai-compatible or openai"]),
        ('{"editor.fontSize": 1}', ["no cline.* settings"]),
        ('{"cline.openAiModelId": "a",\n "cline": {"openAiModelId": "b"}}', ["line 2", "given as cline.openAiModelId"]),
        (
            '[provider]\nmodel="a"\n[server]\nmodel="b"',
            ["server.model (file, line 4)", "provider.model (file, line 2)"],
        ),
    ],
)
def test_cf_05_unknown_names_are_refused_by_line_with_the_nearest_right_one(tmp_path, text, parts):
    message = problems(text, tmp_path)
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[server]\nport = 99999", ["server.port (file, line 2)", "at least 0, at most 65535", "99999"]),
        ("[server]\nport = true", ["server.port", "must not be true"]),
        ('[cache_layout]\n\nmode = "spilt"', ["line 3", "merged (chunked, colocated) or split", "'spilt'"]),
        ('[transfer]\nkv_transfer_mode = "fast"', ["layer (layer-wise) or request (request-wise)", "'fast'"]),
        ('[transfer]\nbackend = "rdma"', ["transfer.backend", "local (shared memory), nixl or cuda_ipc", "'rdma'"]),
        ("[scheduler]\nprefill_token_ratio = nan", ["a number, above 0, at most 1"]),
        ("[kv_cache]\nkv_cache_gib = inf", ["kv_cache.kv_cache_gib (file, line 2)"]),
        ("[cache_layout]\nprefill_gpus = [\n -1]", ["prefill_gpus (file, line 2)", "a whole number, at least 0"]),
        ("[cache_layout]\nchunk_size = 0", ["chunk_size", "from 1 to"]),
        ('[cache_layout]\nchunk_size = "big"', ["chunk_size", "whole number"]),
        ("[server]\nhost = 5", ["server.host", "must be text"]),
        ('[engine]\nmodes = ["both"]', ["engine.modes (file, line 2)", "merged"]),
        ('[[keys]]\nkey = "x"', ["keys[0].name", "is missing"]),
        ('[server]\nhost = ""', ["server.host (file, line 2)", "is empty"]),
        ('[kv_cache]\nkv_cache_dtype = "fp8"', ["fp8", "auto, fp32, fp16, bf16, int8"]),
        ('{"cline.openAiBaseUrl": "http://h", "cline.requestOptions": {"maxTokens": 0}}',
         ["cline.requestOptions.maxTokens (file, line 1)", "at least 1"]),
    ],
)  # fmt: skip
def test_bad_values_are_refused_with_line_and_allowed_values(tmp_path, text, parts):
    message = problems(text, tmp_path)
    assert [part for part in parts if part not in message] == []


def test_every_problem_is_reported_at_once(tmp_path):
    message = problems("[server]\nport = -1\nprot = 2\n[cache_layout]\nmode = 'x'\n", tmp_path)
    assert [f"line {n}" in message for n in (2, 3, 5)] == [True, True, True]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ('mode = "split"xyz', "line 1"),
        ("[server]\n[server]\n", "line 2"),
        ("[server]\nport = 1\nport = 2\n", "line 3"),
        ('{"cline.openAiBaseUrl": "x"\n "b": 1}', "line 2"),
        ('{"cline.openAiBaseUrl": "x"} xyz', "follows the end"),
        ('{"a": /* open', "not closed"),
        ("[" * 3000, "not valid TOML"),
        ('{"a":' + "[" * 3000, "too deeply"),
        ("", "empty"),
        (" \n", "empty"),
        ("[server]".encode("utf-16"), "UTF-16"),
        ("[server]".encode("utf-16-le"), "UTF-16"),
        (b"[server]\nmodel = '\xff\xfe'", "line 2"),
    ],
)
def test_cf_01_cf_03_cf_06_a_malformed_file_is_refused_at_once_by_line(tmp_path, content, part):
    assert part in problems(content, tmp_path)


def test_cf_03_what_is_no_file_is_refused_by_name(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    for path, part in [(tmp_path, "is a directory"), (tmp_path / "none", "does not exist"), (link, "link to a file")]:
        with pytest.raises(SettingsError, match=part) as caught:
            load_settings(path, environ={})
        assert str(path) in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_cf_03_a_file_that_fails_while_it_is_read_is_refused():
    """Whose read fails even for root: nothing is at its beginning."""
    with pytest.raises(SettingsError, match=r"/proc/self/mem: can't be read: "):
        load_settings(Path("/proc/self/mem"), environ={})


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_cf_03_an_unreadable_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("[server]\n")
    path.chmod(0)
    with pytest.raises(SettingsError, match="may not be read"):
        load_settings(path, environ={})


def test_a_file_that_only_holds_comments_says_so(tmp_path):
    path = tmp_path / "file"
    path.write_text("# nothing\n")
    assert "sets nothing" in load_settings(path, environ={}).notices[0]


def test_a_table_whose_only_setting_is_refused_is_not_told_what_else_it_lacks(tmp_path):
    text = '[[keys]]\nmode = "x"\n[[keys]]\nname = "a"\nkey = "k"\nbudget_period = "x"\n'
    told = problems(text, tmp_path).splitlines()
    assert [problem.partition(" ")[0] for problem in told] == ["keys[0].mode", "keys[1].budget_period"]


def test_a_list_with_a_wrong_item_is_shown(tmp_path):
    assert "not ['split', 'both']" in problems('[engine]\nmodes = ["split", "both"]\n', tmp_path)
