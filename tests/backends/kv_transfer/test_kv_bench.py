"""The transfer benchmark: what it measures, between real processes."""

import json

import pytest

from backends.kv_transfer.bench import BYTES_PER_TOKEN, layout_for, main


def test_it_measures_new_pages_pages_ahead_and_later_copies(capsys: pytest.CaptureFixture[str]):
    assert main(["--tokens", "40", "--repeats", "1", "--backend", "local", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert [(item["backend"], item["pages"]) for item in found] == [
        ("local", name) for name in ("new", "ahead", "again")
    ]
    assert all(item["megabytes"] == 40 * BYTES_PER_TOKEN / 1e6 for item in found)


def test_the_pool_is_that_of_the_bundled_model():
    layout = layout_for(4096)

    assert layout.num_bytes == 2 * 4096 * BYTES_PER_TOKEN
    assert layout.num_bytes / 2e6 == pytest.approx(94.4, abs=0.1)
