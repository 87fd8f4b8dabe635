"""Base URLs and channels as people write them: what leads elsewhere is said before anything is sent."""

from __future__ import annotations

import pytest

from gateway.clients.catalog import FILE_CLIENTS
from gateway.clients.client import Api
from gateway.clients.connection import Connection
from gateway.doctor.answer import Answer
from gateway.doctor.client_checks import channel_of, check_base_url, check_file, check_is_kvgate, check_model
from gateway.doctor.finding import Level


@pytest.mark.parametrize(
    ("url", "api", "levels"),
    [
        ("http://h/v1", Api.CHAT, []),
        ("http://h/split/v1", Api.CHAT, []),
        ("http://h", Api.MESSAGES, []),
        ("http://h/split", Api.GEMINI, []),
        ("http://h", Api.CHAT, [Level.WARNING]),
        ("http://h/split", Api.RESPONSES, [Level.WARNING]),
        ("http://h//v1", Api.CHAT, [Level.WARNING]),
        ("http://h/v1?x=1", Api.CHAT, [Level.PROBLEM]),
        ("http://h/v1/chat/completions", Api.CHAT, [Level.PROBLEM]),
    ],
)
def test_shapes_of_a_base_url(url: str, api: Api, levels: list[Level]):
    assert [finding.level for finding in check_base_url(Connection(url), api)] == levels


@pytest.mark.parametrize(
    ("connection", "found"),
    [
        (Connection("http://h/merged/v1", headers={"x-cache-mode": "Split"}), ("split", "header")),
        (Connection("http://h/merged/v1", query={"cache_mode": "split"}), ("split", "query")),
        (Connection("http://h/merged/v1", model="m:split"), ("merged", "path")),
        (Connection("http://h/v1", model="m:split"), ("split", "model")),
        (Connection("http://h/v1", model="qwen:7b"), (None, "")),
    ],
)
def test_the_channel_is_the_highest_that_speaks(connection: Connection, found: tuple[str | None, str]):
    assert channel_of(connection) == found


def test_cc_switchs_own_proxy_is_recognised():
    (finding,) = check_is_kvgate(Answer(status=200, body=b"{}"), Connection("http://127.0.0.1:15721/v1"))
    assert "CC Switch's proxy" in finding.what


def test_settings_that_point_nowhere_say_how_to_connect():
    cline = FILE_CLIENTS["cline"]
    assert "kvgate connect cline" in next(check_file({}, None, cline)).what_to_do
    assert "nowhere near" in next(check_file({"a": 1}, None, cline)).what


def test_a_model_that_is_not_served_is_said():
    cline = FILE_CLIENTS["cline"]
    (finding,) = check_model(Connection("http://h/v1", model="gpt-5"), {"smollm2": 8192}, cline)
    assert "'gpt-5'" in finding.what
    assert "smollm2" in finding.why
    assert len(list(check_model(Connection("http://h/v1"), {}, cline))) == 1
    assert list(check_model(Connection("http://h/v1", model="m"), {"m": None}, cline)) == []
