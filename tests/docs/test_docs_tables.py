"""The tables of README say what the code does: options, flags, headers, metrics, errors, fields, channels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from docs_facts import error_rows, flags, metric_rows, setting_rows, subparsers
from docs_readme import ROOT, code, prose, section, table

from backends.protocol.messages import Timings
from gateway.cli.main import COMMANDS, _parser
from gateway.clients.catalog import FILE_CLIENTS, NAMES
from gateway.core.errors import InvalidRequest
from gateway.core.spelling import MODES
from gateway.core.types import StrategySource
from gateway.dialects import openai_chat, openai_completions
from gateway.dialects.sampling import NO_EFFECT, Defaults
from gateway.service.exchange import Outcome
from gateway.service.exchange_facts import _SPLIT_FACTS, _leg_facts
from gateway.settings.cline_shape import NAMES as CLINE_NAMES
from gateway.settings.cline_shape import PREFIX
from gateway.settings.environment import OTHER_VARIABLES
from gateway.settings.options import list_tables
from gateway.settings.reloading import FIXED
from gateway.settings.schema import Settings
from gateway.settings.toml_shape import PROVIDER_FORM
from gateway.strategy.resolve import BODY_FIELDS
from gateway.strategy.wish import KEYS
from gateway.upstreams.base import Served
from gateway.upstreams.http.headers import _TO_CLIENT, _TO_CLIENT_PREFIXES
from gateway.upstreams.pd.plans import PLANS
from gateway.web.keys import ROLES
from gateway.web.routes import ROUTES


def as_rows(cells: list[list[str]]) -> str:
    """What README has to say, ready to paste."""
    return "the table in README.md has to begin each row with:\n" + "\n".join(f"| {' | '.join(row)} |" for row in cells)


# ------------------------------------------------------------------------------------------------ settings and flags


@pytest.mark.parametrize("name", Settings.model_fields)
def test_a_settings_table_has_every_option_with_its_default_and_values(name: str):
    title = f"[[{name}]]" if name in list_tables() else f"[{name}]"
    rows = table(title)

    assert [row[:3] for row in rows] == setting_rows(name), as_rows(setting_rows(name))
    assert all(len(row) == 4 and row[3] for row in rows), "every option needs a meaning"


def test_every_flag_of_serve_is_listed():
    assert [code(row[0])[0] for row in table("Flags of kvgate serve")] == [name for name, _ in flags("serve")]


def test_every_flag_of_compare_is_listed_with_its_default():
    listed = [(code(row[0])[0], (code(row[1]) or [row[1]])[0]) for row in table("kvgate compare")]

    def shown(default: Any) -> str:
        return "not set" if default is None else default if isinstance(default, str) else json.dumps(default)

    assert listed == [(name, shown(default)) for name, default in flags("compare")]


def test_every_command_is_mentioned():
    text = "\n".join(section("Other commands")) + prose()
    assert [name for name in COMMANDS if f"kvgate {name}" not in text] == []
    assert set(subparsers(_parser([])).choices) == set(COMMANDS)


def test_variables_that_are_no_options_are_all_explained():
    assert [name for name in OTHER_VARIABLES if f"`{name}" not in "\n".join(section("Settings"))] == []


def test_every_variable_that_the_code_reads_is_an_option_or_known():
    """Any other would be refused at start as a typo."""
    sources = [
        path.read_text(encoding="utf-8") for room in ("gateway", "backends") for path in (ROOT / room).rglob("*.py")
    ]
    read = {name for source in sources for name in re.findall(r'"(KVGATE_[A-Z]+(?:_[A-Z]+)*)"', source)}
    assert read == set(OTHER_VARIABLES)


# ----------------------------------------------------------------------------------------------------------- clients


def test_connect_lists_every_client_its_file_and_the_size_of_its_first_request():
    rows = {code(row[0])[0]: row for row in table("kvgate connect")}
    assert list(rows) == list(NAMES)
    for name, client in FILE_CLIENTS.items():
        shown = client.find_file(Path("~"), {})
        assert (code(rows[name][1]), rows[name][4]) == ([str(shown)], f"{client.first_request_tokens:,}")


# ------------------------------------------------------------------------------------------------------ other shapes


def test_shape_b_lists_every_key_and_where_it_goes():
    listed = {code(row[0])[0]: code(row[1])[0] for row in table("Shape B: an editor's settings.json")}
    assert listed == {PREFIX + name: ".".join(map(str, path)) for name, path in CLINE_NAMES.items()}


def test_shape_c_lists_every_key_and_where_it_goes():
    listed = {code(row[0])[0]: code(row[1])[0] for row in table("Shape C: provider and cache")}
    assert listed == {".".join(map(str, name)): ".".join(map(str, path)) for name, path in PROVIDER_FORM.items()}


def test_every_file_of_configs_is_listed():
    listed = [code(row[0])[0] for row in table("The unified upstream")]
    assert sorted(listed) == sorted(f"configs/{path.name}" for path in (ROOT / "configs").iterdir())


# ----------------------------------------------------------------------------------------------------------- channels


def test_channels_stand_in_their_order_of_precedence():
    assert [code(row[0])[0] for row in table("Choosing the mode")] == list(StrategySource)


def test_every_spelling_of_a_mode_is_named():
    spellings = next(line for line in section("Choosing the mode") if line.startswith("Spellings"))
    assert set(MODES) <= set(code(spellings))


def test_the_cache_strategy_table_has_every_key_in_every_spelling():
    listed = {(code(row[0])[0], *code(row[1])) for row in table("The cache strategy")}
    assert listed == set(KEYS.values())


# ------------------------------------------------------------------------------------------------------------- routes


def test_every_path_and_method_is_listed():
    listed = {(code(row[0])[0], row[1]) for row in table("Paths")}
    served = {
        (_shown_path(name), method) for name, methods in ROUTES.items() for method in methods
    }  # a mode prefix, /api and the like are in the text
    assert listed == served


def _shown_path(name: str) -> str:
    at_root = name in {"", "metrics", "ready", "health"}
    return ("/" if at_root else "/v1/") + name.replace("*", "{id}")


# --------------------------------------------------------------------------------------------------- fields of requests


class Recording(dict[str, Any]):
    """A body that remembers which fields a dialect looked for."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


def fields_read() -> set[str]:
    chat = Recording({"messages": [{"role": "user", "content": "hi"}], "tools": None})
    text = Recording({"prompt": "hi"})
    openai_chat.DIALECT.parse(chat, Defaults())
    openai_completions.DIALECT.parse(text, Defaults())
    return chat.seen | text.seen


def named(title: str) -> set[str]:
    return {name for row in table(title) for name in code(row[0])}


def refused_names() -> set[str]:
    names = code("\n".join(section("Fields that are refused")))
    return {name for name in names if name != "text"}


def test_the_three_lists_of_fields_hold_every_field_that_is_known_and_no_other():
    without_effect = set(code("\n".join(section("Fields without effect")))) - {"X-Kvgate-Notice"}
    acting = named("Fields that act")

    assert without_effect == set(NO_EFFECT) - {"model", "stream"}
    assert acting | refused_names() | without_effect == fields_read() | set(NO_EFFECT) | set(BODY_FIELDS)
    assert not acting & refused_names()


REFUSED = {
    "prompt_logprobs": 1, "suffix": "x", "functions": [{}], "function_call": "x", "modalities": ["audio"], "audio": {},
}  # fmt: skip


def test_fields_that_are_refused_are_refused_by_name():
    assert set(REFUSED) == refused_names()
    for name, value in REFUSED.items():
        with pytest.raises(InvalidRequest) as refusal:
            openai_chat.DIALECT.parse({"messages": [{"role": "user", "content": "hi"}], name: value}, Defaults())
        assert refusal.value.param == name


# ------------------------------------------------------------------------------------------------------------ answers

OUR_HEADER = re.compile(r'"(X-[A-Za-z-]+|x-[a-z-]+|Server-Timing|Retry-After)"')
INTERNAL = {"x-kvgate-hop", "x-accel-buffering", "x-stainless-", "x-claude-code-", "x-ratelimit-", "x-gzip"}
INTERNAL |= {"x-data-parallel-rank", "x-prefiller-host-port"}  # to the servers of a pair
NOT_OURS = {"authorization", "content-encoding", "anthropic-version", "session_id", "session-id"}


def headers_in_code() -> set[str]:
    """Every header named in the rooms that read and write them."""
    found: set[str] = set()
    for room in ("web", "service", "strategy", "upstreams"):
        for path in (ROOT / "gateway" / room).rglob("*.py"):
            found |= {name.lower() for name in OUR_HEADER.findall(path.read_text(encoding="utf-8"))}
    return found - INTERNAL


def test_every_header_is_listed():
    listed = {name.lower() for name in named("Headers to send") | named("Headers that come back")}
    assert headers_in_code() - listed == set()


def test_every_listed_header_exists():
    ours = headers_in_code() | NOT_OURS | {name.lower() for name in _TO_CLIENT.values()}
    passed_on = {f"{prefix}*" for prefix in _TO_CLIENT_PREFIXES}
    listed = {name.lower() for name in named("Headers to send") | named("Headers that come back")}
    assert listed - ours == passed_on


def test_server_timing_lists_every_phase():
    source = (ROOT / "gateway/service/exchange_headers.py").read_text(encoding="utf-8")
    assert named("Server-Timing") == set(re.findall(r'phases\["(\w+)"\]', source))


def test_the_timing_line_lists_every_fact():
    source = (ROOT / "gateway/service/exchange_facts.py").read_text(encoding="utf-8")
    facts = set(re.findall(r'facts\["(\w+)"\]', source)) | set(Timings.__struct_fields__)
    of_pairs = set(_leg_facts(Served(queue_seconds=1, prefill_seconds=1, decode_first_seconds=1)))
    assert named("The timing line and records") == facts | of_pairs | {"e2e_seconds", "transfer_overlap_ratio"}


def test_the_timing_line_marks_exactly_what_a_merged_answer_has_not():
    marked = {
        name for row in table("The timing line and records") if row[1].startswith("split:") for name in code(row[0])
    }
    assert marked == _SPLIT_FACTS | {"transfer_overlap_ratio"}


def test_every_kind_of_pair_is_explained():
    assert [code(row[0])[0] for row in table("vLLM and SGLang pairs")] == list(PLANS)


def test_what_needs_a_restart_is_named():
    text = "\n".join(section("Reload"))
    wanted = {"engine"} | {name for table_name, names in FIXED.items() for name in names or (table_name,)}
    assert [name for name in wanted if not re.search(rf"`\[*{name}\]*`", text)] == []


# -------------------------------------------------------------------------------------------------- metrics and errors


def test_every_metric_is_listed_with_type_labels_and_meaning():
    assert table("Metrics") == metric_rows(), as_rows(metric_rows())


def test_closed_sets_of_labels_are_named():
    text = "\n".join(section("Metrics"))
    assert [outcome for outcome in Outcome if f"`{outcome}`" not in text] == []
    assert [role for role in ROLES if f"`{role}`" not in text] == []


def test_every_error_is_listed_with_status_code_and_type():
    rows = table("Errors")
    shown = [(row[0], (code(row[1]) or [row[1]])[0], code(row[2])[0]) for row in rows]
    assert shown == error_rows()
    assert all(row[3] and row[4] for row in rows)


# --------------------------------------------------------------------------------------------------------- development


def test_the_tree_names_folders_that_exist_and_misses_none():
    listed = {code(row[0])[0] for row in table("Development")}
    rooms = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("gateway/*/__init__.py")}
    rooms |= {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("backends/*/__init__.py")}
    shared = {"gateway/core"}  # the words of the domain, in every room

    assert [path for path in listed if not (ROOT / path).exists()] == []
    assert rooms - listed == shared


def test_paths_in_the_text_exist():
    named_paths = [
        name for name in code(prose()) if re.fullmatch(r"(configs|docker|tests|gateway|backends)/[\w./-]+", name)
    ]
    assert named_paths
    assert [name for name in named_paths if not Path(ROOT / name).exists()] == []
