"""One way to normalise a base URL, one way to join a path to it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.settings.base_url import join_url, normalise_base_url
from gateway.settings.errors import SettingsError

PATHS = ["chat/completions", "completions", "models", "responses", "messages"]


@pytest.mark.parametrize(
    ("text", "url", "num_notices"),
    [
        ("http://h/v1", "http://h/v1", 0),
        ("http://h/v1/", "http://h/v1", 1),
        ("http://h/v1//", "http://h/v1", 1),
        ("http://h", "http://h", 0),
        ("http://h/", "http://h", 0),
        ("http://h/api/paas/v4", "http://h/api/paas/v4", 0),
        ("http://h/v1/chat/completions", "http://h/v1", 1),
        ("https://h/api/chat/completions/", "https://h/api", 2),
        ("http://h/v1/models", "http://h/v1", 1),
        ("http://h/v1/messages/count_tokens", "http://h/v1", 1),
        ("http://h/models", "http://h/models", 0),
        (" http://h/v1 \n", "http://h/v1", 1),
        ("HTTP://H/v1", "http://h/v1", 0),
        ("https://Host.Example/Api", "https://host.example/Api", 0),
        ("https://h/api?key=sk-secret", "https://h/api", 1),
        ("https://h/api#x", "https://h/api", 1),
        ("https://h/api?", "https://h/api", 1),
        ("http://h/v1/v1", "http://h/v1", 1),
        ("http://h//api//v1", "http://h/api/v1", 1),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1", 0),
        ("http://127.0.0.1:15721", "http://127.0.0.1:15721", 0),
        ("https://taotoken.net/api", "https://taotoken.net/api", 0),
    ],
)
def test_au_07_a_base_url_has_one_form(text, url, num_notices):
    result, notices = normalise_base_url(text, "server.api_base")
    assert result == url
    assert len(notices) == num_notices
    assert all(notice.startswith("server.api_base: ") for notice in notices)
    assert "sk-secret" not in "".join(notices)


@pytest.mark.parametrize(
    "text",
    ["h:8000/v1", "h/v1", "", "ftp://h", "http://", "http:/h", "http://h:99999", "http://h:x/v1", "http://u:sk-secret@h/v1",
     "http://h/a b", "http://h\r\nx/v1", "//h/v1", "http://[::1/v1", "localhost:8000"],
)  # fmt: skip
def test_what_is_no_base_url_is_refused_by_setting_and_not_shown(text):
    with pytest.raises(SettingsError) as caught:
        normalise_base_url(text, "server.api_base")
    assert str(caught.value).startswith("server.api_base: ")
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "prefix"),
    [
        ("http://h", "http://h/v1"),
        ("http://h/v1", "http://h/v1"),
        ("http://h/api/paas/v4", "http://h/api/paas/v4"),
        ("http://h/v1beta", "http://h/v1beta"),
        ("http://h/v1beta/openai", "http://h/v1beta/openai"),
        ("https://taotoken.net/api", "https://taotoken.net/api/v1"),
        ("https://h/v1x", "https://h/v1x/v1"),
        ("https://h/split/v1", "https://h/split/v1"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lead", ["/v1/", "/", "", "v1/"])
def test_au_08_every_path_is_joined_alike(base, prefix, path, lead):
    assert join_url(base, lead + path) == f"{prefix}/{path}"


@settings(derandomize=True, max_examples=100)
@given(
    segments=st.lists(st.sampled_from(["v1", "v4", "api", "openai", "x", ""]), max_size=5),
    path=st.sampled_from(PATHS),
    slashes=st.text(alphabet="/", max_size=3),
)
def test_no_base_gives_a_doubled_slash_or_version(segments, path, slashes):
    base, _ = normalise_base_url("http://h/" + "/".join(segments) + slashes)
    url = join_url(base, f"/v1/{path}")
    assert "//" not in url.removeprefix("http://")
    assert f"/v1/v1/{path}" not in url
    assert normalise_base_url(base) == (base, ())
