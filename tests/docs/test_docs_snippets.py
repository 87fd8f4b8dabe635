"""Every fenced block of README works: settings load, commands and flags exist, bodies are accepted, Python compiles."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml
from docs_facts import command_parser
from docs_readme import ROOT, Block, blocks, blocks_in, code, lines, prose, section, table

from gateway.cli.main import COMMANDS
from gateway.core.spelling import parse_mode
from gateway.dialects import openai_chat, openai_completions
from gateway.dialects.sampling import Defaults
from gateway.settings.importers import load_settings
from gateway.settings.schema import Settings
from gateway.strategy.resolve import BODY_FIELDS, resolve_strategy
from gateway.web import chat
from gateway.web.paths import find
from gateway.web.routes import ROUTES

LANGUAGES = {"bash", "json", "python", "text", "toml", "yaml"}
PARSERS = {"chat/completions": openai_chat.DIALECT.parse, "completions": openai_completions.DIALECT.parse}


def names(chosen: list[Block]) -> Any:
    return pytest.mark.parametrize("block", chosen, ids=[f"line{block.line}" for block in chosen])


def test_every_block_says_its_language():
    assert {block.language for block in blocks()} == LANGUAGES


# ----------------------------------------------------------------------------------------------------- settings, code


@names(blocks_in("toml"))
def test_settings_load(block: Block, tmp_path: Path):
    path = tmp_path / "kvgate.toml"
    path.write_text(block.text, encoding="utf-8")
    references = re.findall(r"\$\{(\w+)\}", block.text)
    environ = {name: f"sk-{number:08}-test" for number, name in enumerate(references)}

    assert load_settings(path, environ=environ).settings != Settings()


def test_the_settings_json_loads(tmp_path: Path):
    (block,) = [block for block in blocks_in("json") if "cline." in block.text]
    path = tmp_path / "settings.json"
    path.write_text(block.text, encoding="utf-8")
    settings = load_settings(path, environ={"TAOTOKEN_API_KEY": "sk-00000000"}).settings
    assert settings.server.api_base == "https://taotoken.net/api"
    assert settings.cache_layout.chunk_size == 512


@names(blocks_in("json"))
def test_json_is_json(block: Block):
    assert isinstance(json.loads(block.text), dict)


@names(blocks_in("yaml"))
def test_yaml_is_yaml(block: Block):
    assert yaml.safe_load(block.text)


@names(blocks_in("python"))
def test_python_compiles(block: Block):
    compile(block.text, str(block), "exec")


def test_bodies_of_the_python_client_are_valid_strategies():
    (found,) = [found for block in blocks_in("python") if (found := re.search(r"extra_body=(\{.*\}),", block.text))]
    strategy, _ = resolve_strategy(settings=Settings(), header="split", body=json.loads(found[1]))
    assert strategy.transfer_mode == "request"


# ----------------------------------------------------------------------------------------------------------- commands


def commands(block: Block) -> Iterator[list[str]]:
    """Each command line of a block as words; continued lines joined, comments removed."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def called(program: str) -> list[tuple[Block, list[str]]]:
    return [(block, words) for block in blocks_in("bash") for words in commands(block) if words[0] == program]


def inline(program: str) -> list[list[str]]:
    """Commands in the text, in code marks."""
    spans = [span for span in code(prose()) if span.startswith(f"{program} ")]
    return [shlex.split(span) for span in spans]


def test_only_known_programs_are_called():
    programs = {words[0] for block in blocks_in("bash") for words in commands(block)}
    assert programs == {"make", "curl", "kvgate", "cp", "cline", "docker", "export"}


@pytest.mark.parametrize("words", [*(words for _, words in called("kvgate")), *inline("kvgate")], ids=" ".join)
def test_commands_of_the_product_parse(words: list[str]):
    _, command, *arguments = words
    assert command in COMMANDS
    if command == "model":
        assert not arguments or arguments[0] in {"pull", "list", "path", "packed", "--help"}
    elif "--help" in arguments:
        with pytest.raises(SystemExit) as ended:
            command_parser(command).parse_args(arguments)
        assert ended.value.code == 0
    else:
        command_parser(command).parse_args(arguments)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    variables = set(re.findall(r"^([A-Z_]+) \?=", makefile, flags=re.M))
    used = [word for words in [*(words for _, words in called("make")), *inline("make")] for word in words[1:]]

    assert {word for word in used if "=" not in word} <= targets
    assert {word.partition("=")[0] for word in used if "=" in word} <= variables


def test_options_passed_through_make_are_options_of_serve():
    passed = [
        word.partition("=")[2] for words in inline("make") if "serve" in words for word in words if "ARGS=-" in word
    ]
    assert passed
    for arguments in passed:
        command_parser("serve").parse_args(shlex.split(arguments))


def test_files_that_commands_name_exist():
    named = [word for block in blocks_in("bash") for words in commands(block) for word in words if "/" in word]
    ours = [word for word in named if word.startswith(("configs/", "docker/"))]
    assert ours
    assert [word for word in ours if not (ROOT / word).is_file()] == []


def test_compose_profiles_and_services_exist():
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text(encoding="utf-8"))
    for _, words in called("docker"):
        if "--profile" in words:
            profile = words[words.index("--profile") + 1]
            assert any(profile in service.get("profiles", []) for service in compose["services"].values())
        assert set(words[words.index("--build") + 1 :]) <= set(compose["services"])


# --------------------------------------------------------------------------------------------------------------- curl


def curl_calls() -> list[list[str]]:
    return [words for _, words in called("curl")]


def options(words: list[str], name: str) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words[:-1]) if word == name]


@pytest.mark.parametrize("words", curl_calls(), ids=[str(i) for i in range(len(curl_calls()))])
def test_requests_are_accepted(words: list[str]):
    url = urlsplit(next(word for word in words if word.startswith("http://")))
    place = find(url.path)
    assert place is not None
    bodies = options(words, "-d")
    assert ("POST" if bodies else "GET") in ROUTES[place.name]
    headers = dict(header.split(": ", 1) for header in options(words, "-H"))
    for text in bodies:
        body = json.loads(text)
        strategy, model = resolve_strategy(
            settings=Settings(),
            header=headers.get("X-Cache-Mode"),
            body={name: body[name] for name in BODY_FIELDS if name in body},
            query=dict(parse_qsl(url.query)),
            model=body["model"],
        )
        parsed = PARSERS[place.name]({k: v for k, v in body.items() if k not in BODY_FIELDS}, Defaults())
        assert (model, strategy.notices, parsed.notices) == ("smollm2", (), ())
        assert headers["Content-Type"] == "application/json"


def test_the_first_two_requests_differ_in_the_mode_alone():
    split, merged, *_ = curl_calls()
    assert [
        ("split" if word == "X-Cache-Mode: merged" else word.replace("merged", "split")) for word in merged
    ] != split
    assert [word.replace("X-Cache-Mode: merged", "X-Cache-Mode: split") for word in merged] == split


def test_both_languages_begin_with_the_same_commands():
    bash = blocks_in("bash")
    assert list(commands(bash[0])) == list(commands(bash[2])) == [["make", "serve"], ["make", "test"]]
    assert bash[1].text == bash[3].text


def test_examples_of_channels_work():
    rows = {code(row[0])[0]: row[1] for row in table("Choosing the mode")}
    for text in re.findall(r"`([^`]+)`", rows["body"]):
        strategy, _ = resolve_strategy(settings=Settings(), body=json.loads(f"{{{text}}}"))
        assert (strategy.mode, strategy.source) == ("split", "body")
    header = code(rows["header"])[0].removeprefix("X-Cache-Mode: ")
    assert parse_mode(header) == "split"
    assert [place.mode for path in code(rows["path"])[:2] if (place := find(path))] == ["split", "merged"]
    query = dict(parse_qsl(urlsplit(code(rows["query"])[0]).query))
    assert resolve_strategy(settings=Settings(), query=query)[0].source == "query"


# ---------------------------------------------------------------------------------------------------------------- text


def test_links_inside_the_page_lead_somewhere():
    headings = [line.lstrip("# ") for line in lines() if re.match(r"^#{1,4} ", line)]
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    wanted = re.findall(r"\]\(#([^)]+)\)", prose())
    assert wanted
    assert [anchor for anchor in wanted if anchor not in anchors] == []


def test_links_to_files_lead_to_files():
    files = [link for link in re.findall(r"\]\(([^)#]+)\)", prose()) if "://" not in link]
    assert [link for link in files if not (ROOT / link).exists()] == []


def test_apis_that_are_said_not_to_be_served_are_not():
    said = [path for row in table("Paths") if row[2] == "404" for path in code(row[0])]
    places = [find(path.replace("{id}", "smollm2")) for path in said]
    answering_no = {name for name, methods in ROUTES.items() if methods.get("POST") is chat.not_here}

    assert {place.name for place in places if place} == answering_no
    assert any("Embeddings are not served" in line for line in section("Clients"))


def test_apis_that_are_said_to_be_served_are():
    listed = [path for row in table("Clients") for path in code(row[1]) if path.startswith("/")]
    assert len(listed) == 6
    for path in listed:
        place = find(path.replace("{id}", "smollm2"))
        assert place is not None
        assert ROUTES[place.name]["POST"] in (chat.answer, chat.count_tokens)
