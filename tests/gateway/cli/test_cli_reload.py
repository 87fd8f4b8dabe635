"""`kvgate serve` reads its settings again: on SIGHUP, and when a file has changed."""

from __future__ import annotations

import os
import signal

import pytest

from support.gateway_process import running_gateway, wait_until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")

CONFIG = """
[[targets]]
name = "far"
base_url = "http://127.0.0.1:9/v1"
models = ["{model}"]
api_key_file = "far.key"
{more}
"""


def models(gateway):
    return [entry["id"] for entry in gateway.get("/v1/models")["data"]]


def state(gateway):
    return gateway.get("/ready")["settings"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "far.key").write_text("sk-far-first-0123456789\n")
    return tmp_path


def test_a_changed_file_is_read_again_and_a_bad_one_is_not_taken_over(folder):
    path = folder / "kvgate.toml"
    with running_gateway(CONFIG.format(model="one", more=""), folder) as gateway:
        assert models(gateway) == ["one"]
        other = folder / "other.toml"
        other.write_text(CONFIG.format(model="two", more=""))
        os.replace(other, path)  # as editors do it
        wait_until(lambda: models(gateway) == ["two"], "the new file is in force")

        path.write_text(CONFIG.format(model="three", more="[server]\nprot = 1\n"))
        wait_until(lambda: state(gateway)["problems"], "the bad file was refused")
        assert models(gateway) == ["two"]
        assert "did you mean port?" in gateway.log
        assert "stay in force" in gateway.log

        path.write_text(CONFIG.format(model="four", more="[kv_cache]\nblock_size = 32\n[server]\nport = 1\n"))
        wait_until(lambda: models(gateway) == ["four"], "the mended file is in force")
        assert state(gateway)["needs_restart"] == ["kv_cache.block_size"]  # --port stands above the file
        assert gateway.process.poll() is None


def test_sighup_reads_again_even_what_is_not_watched_and_no_key_is_ever_logged(folder):
    more = "[server]\nwatch_settings = false\n"
    with running_gateway(CONFIG.format(model="one", more=more), folder) as gateway:
        (folder / "far.key").write_text("sk-far-second-0123456789\n")
        (folder / "kvgate.toml").write_text(CONFIG.format(model="two", more=more))
        gateway.process.send_signal(signal.SIGHUP)
        wait_until(lambda: models(gateway) == ["two"], "the signal was heeded")
        gateway.process.send_signal(signal.SIGHUP)
        wait_until(lambda: state(gateway)["generation"] == 3, "and once more")
        (folder / "far.key").unlink()
        gateway.process.send_signal(signal.SIGHUP)
        wait_until(lambda: state(gateway)["problems"], "a missing key file is refused")
        assert models(gateway) == ["two"]
        assert gateway.stop() == 0
        assert "sk-far" not in gateway.log


def test_a_changed_key_file_is_a_change(folder):
    with running_gateway(CONFIG.format(model="one", more=""), folder) as gateway:
        (folder / "far.key").write_text("sk-far-second-0123456789\n")
        wait_until(lambda: state(gateway)["generation"] == 2, "the key was read again")


PAIR = """
[[pairs]]
name = "far"
engine = "vllm"
merged = ["http://127.0.0.1:{port}"]
models = ["m"]
api_key_file = "far.key"
"""


def test_a_changed_pair_and_its_changed_key_file_need_no_restart(folder):
    with running_gateway(PAIR.format(port=9), folder) as gateway:
        (folder / "far.key").write_text("sk-far-second-0123456789\n")
        wait_until(lambda: state(gateway)["generation"] == 2, "the key was read again")
        (folder / "kvgate.toml").write_text(PAIR.format(port=10))
        wait_until(lambda: state(gateway)["generation"] == 3, "the pair was read again")
        ready = gateway.get("/ready")
        assert [server["url"] for server in ready["targets"]["far"]["servers"]] == ["http://127.0.0.1:10"]
        assert ready["settings"]["needs_restart"] == []
        wait_until(
            lambda: gateway.log.count("target far: its servers are no longer watched") == 2, "the old ones ended"
        )
        assert gateway.stop() == 0
        assert "sk-far" not in gateway.log


def test_a_key_file_that_was_missing_is_read_as_soon_as_it_is_there(folder):
    with running_gateway(CONFIG.format(model="one", more=""), folder) as gateway:
        (folder / "kvgate.toml").write_text(CONFIG.format(model="two", more="").replace("far.key", "later.key"))
        wait_until(lambda: "later.key: the key file does not exist" in str(state(gateway)["problems"]), "refused")
        (folder / "later.key").write_text("sk-far-second-0123456789\n")
        wait_until(lambda: models(gateway) == ["two"], "the settings are in force")
        assert state(gateway)["problems"] == []


def test_a_pipe_in_place_of_the_file_is_refused_and_holds_up_nothing(folder):
    with running_gateway(CONFIG.format(model="one", more=""), folder) as gateway:
        (folder / "kvgate.toml").unlink()
        os.mkfifo(folder / "kvgate.toml")
        wait_until(lambda: "is a pipe" in str(state(gateway)["problems"]), "the pipe was refused")
        assert models(gateway) == ["one"]
        assert gateway.stop() == 0
