"""The GGUF file of a bundled model: fetched once, checked, and never half there."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest

from backends.models import gguf_file
from backends.models.cache import ModelUnavailable

CONTENT = b"GGUF and more"
MODEL = dataclasses.replace(
    gguf_file.find_bundled("smollm2"), num_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest()
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVGATE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_file, "find_bundled", lambda name: MODEL if name == "smollm2" else None)
    return tmp_path / "cache"


class Downloads:
    def __init__(self, content=CONTENT):
        self.content = content
        self.count = 0

    def __call__(self, model, folder):
        self.count += 1
        file = folder / model.file
        file.write_bytes(self.content)
        return file


def test_it_is_downloaded_once_and_kept(cache):
    downloads = Downloads()
    first = gguf_file.pull_gguf("smollm2", download=downloads)
    second = gguf_file.pull_gguf("smollm2", download=downloads)

    assert first == second == cache / "gguf" / MODEL.file
    assert first.read_bytes() == CONTENT
    assert downloads.count == 1


def test_a_file_that_was_changed_is_fetched_again(cache):
    file = gguf_file.pull_gguf("smollm2", download=Downloads())
    file.write_bytes(CONTENT[:-1] + b"!")

    assert gguf_file.pull_gguf("smollm2", download=Downloads()).read_bytes() == CONTENT


def test_another_file_leaves_nothing_behind(cache):
    with pytest.raises(ModelUnavailable, match="isn't the bundled model"):
        gguf_file.pull_gguf("smollm2", download=Downloads(b"something else"))
    assert list((cache / "gguf").iterdir()) == []


def test_a_copied_file_is_taken_and_stays_where_it_is(tmp_path, cache):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(CONTENT)

    assert gguf_file.pull_gguf("smollm2", copy).read_bytes() == CONTENT
    assert copy.exists()


def test_the_path_of_a_gguf_file_is_its_own_answer(tmp_path):
    file = tmp_path / "own.gguf"
    file.write_bytes(CONTENT)

    assert gguf_file.pull_gguf(str(file)) == file
    with pytest.raises(ModelUnavailable, match="has no GGUF file"):
        gguf_file.pull_gguf(str(tmp_path))
