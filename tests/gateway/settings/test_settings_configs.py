"""The ready-to-copy files of configs/: each loads, and kvgate.toml lists every option with its default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.settings.importers import Shape, load_settings
from gateway.settings.options import list_tables, native_tables, table_model
from gateway.settings.schema import EngineSettings, Settings

CONFIGS = Path(__file__).parents[3] / "configs"
EXPECTED = {
    "cc-switch.toml": (Shape.CC_SWITCH, "merged", False),
    "cline-settings.merged.json": (Shape.CLINE, "merged", False),
    "cline-settings.split.json": (Shape.CLINE, "split", False),
    "disaggregated.toml": (Shape.NATIVE, "split", True),
    "kvgate.toml": (Shape.NATIVE, "merged", True),
    "local.toml": (Shape.NATIVE, "merged", True),
    "merged.toml": (Shape.NATIVE, "merged", True),
    "sglang_pair.toml": (Shape.NATIVE, "split", False),
    "upstream-only.toml": (Shape.NATIVE, "merged", False),
    "vllm_pair.toml": (Shape.NATIVE, "split", False),
}
OPTION = re.compile(r"^(?:# )?(\w+) = (.*?)(?:\s{2,}# ?(.*))?$")
HEADER = re.compile(r"^(?:# )?\[+(\w+)\]+")


def test_every_file_is_expected():
    assert {path.name for path in CONFIGS.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_file_loads(name):
    shape, mode, has_engine = EXPECTED[name]
    loaded = load_settings(CONFIGS / name, environ={"TAOTOKEN_API_KEY": "sk-test"})
    assert loaded.shape is shape
    assert loaded.settings.cache_layout.mode == mode
    assert (loaded.settings.effective_engine() is not None) is has_engine
    assert load_settings(CONFIGS / name, environ={}).settings.server.api_key is None


@pytest.mark.parametrize(
    "name",
    [
        "disaggregated.toml",
        "merged.toml",
        "kvgate.toml",
        "local.toml",
        "upstream-only.toml",
        "vllm_pair.toml",
        "sglang_pair.toml",
    ],
)
def test_native_files_need_no_notice(name):
    assert load_settings(CONFIGS / name, environ={"TAOTOKEN_API_KEY": "sk-test"}).notices == tuple(
        notice for notice in load_settings(CONFIGS / name, environ={"TAOTOKEN_API_KEY": "sk-test"}).notices
        if "forward_client_key" in notice
    )  # fmt: skip


def options_of_native_file() -> dict[tuple[str, str], tuple[str, str]]:
    """(table, key) -> (value, remark), commented lines included."""
    table, found = "", {}
    for line in (CONFIGS / "kvgate.toml").read_text().splitlines():
        if header := HEADER.match(line):
            table = header[1]
        elif option := OPTION.match(line):
            found[table, option[1]] = (option[2], option[3] or "")
    return found


def test_the_native_file_lists_every_option():
    assert set(options_of_native_file()) == {(table, key) for table, keys in native_tables().items() for key in keys}


def test_the_native_file_with_every_line_active_loads(tmp_path):
    text = re.sub(r"^# (?!\w*key_file)(\w+ = |\[)", r"\1", (CONFIGS / "kvgate.toml").read_text(), flags=re.M)
    path = tmp_path / "all.toml"
    path.write_text(text)
    settings = load_settings(path, environ={}).settings
    assert (len(settings.keys), len(settings.targets), len(settings.routes)) == (1, 1, 1)


def test_the_native_file_shows_true_defaults(tmp_path):
    lines = []
    for (table, key), (value, remark) in options_of_native_file().items():
        if table not in list_tables() and not remark.startswith("example"):
            lines.append(f"{table}.{key} = {value}")
            assert table_model(table).model_fields[key].default is not None
    path = tmp_path / "defaults.toml"
    path.write_text("\n".join(lines))
    assert load_settings(path, environ={}).settings == Settings(engine=EngineSettings())
