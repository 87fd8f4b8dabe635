"""`kvgate compare` on the command line: options, refusals, help, progress. No gateway needed."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys

import pytest

from gateway.bench.options import CompareError, CompareOptions, Warmth
from gateway.cli import compare
from gateway.cli.progress import ProgressBar
from gateway.core.types import CacheMode

MERGED, SPLIT = CacheMode.MERGED, CacheMode.SPLIT


def parser():
    top = argparse.ArgumentParser(prog="kvgate")
    compare.add_parser(top.add_subparsers())
    return top


def job(*argv):
    return compare.job_from(parser().parse_args(["compare", *argv]))


def test_without_options_the_defaults_of_the_comparison_hold(monkeypatch):
    monkeypatch.delenv("KVGATE_KEY", raising=False)

    assert job().options == CompareOptions()
    assert (job().url, job().key) == ("http://127.0.0.1:8000", None)


def test_every_option_reaches_the_comparison():
    options = job(
        "--model", "m", "--prompt-tokens", "9", "--output-tokens", "8", "--requests", "7", "--concurrency", "6",
        "--rounds", "5", "--seed", "4", "--cache", "warm", "--modes", "pd, Merged", "--timeout", "2.5",
    ).options  # fmt: skip

    assert options == CompareOptions(
        model="m", prompt_tokens=9, output_tokens=8, num_requests=7, concurrency=6, num_rounds=5, seed=4,
        warmth=Warmth.WARM, modes=(SPLIT, MERGED), timeout_seconds=2.5,
    )  # fmt: skip


def test_the_key_comes_by_flag_or_environment_and_is_not_in_the_representation(monkeypatch):
    monkeypatch.setenv("KVGATE_KEY", "sk-env")

    assert job().key == "sk-env"
    assert job("--key", "sk-flag").key == "sk-flag"
    assert "sk-env" not in repr(job())


def test_a_prompt_file_is_read_without_its_byte_order_mark(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfOnce upon")

    assert job("--prompt-file", str(file)).options.prompt_text == "Once upon"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--modes", "merged,auto"], "merged .* or split"),
        (["--modes", "merged,chunked"], "twice"),
        (["--modes", ""], "merged .* or split"),
        (["--json", "--csv"], "both go to stdout"),
        (["--prompt-file", "/nowhere/at/all"], "--prompt-file"),
        (["--prompt-file", __file__, "--prompt-tokens", "5"], "exclude each other"),
        (["--json", "/nowhere/at/all/x.json"], "--json .*not a file in an existing folder"),
        (["--csv", "/"], "--csv"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(argv, words):
    with pytest.raises(CompareError, match=words):
        job(*argv)


@pytest.mark.parametrize("argv", [["--requests", "0"], ["--timeout", "-1"], ["--timeout", "inf"], ["--rounds", "x"]])
def test_numbers_out_of_range_are_refused_by_the_parser(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        job(*argv)

    assert stopped.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_a_refusal_is_one_line_and_exit_code_2(capsys):
    arguments = parser().parse_args(["compare", "--modes", "fast"])

    assert arguments.run(arguments) == 2
    assert capsys.readouterr().err.startswith("kvgate compare: --modes 'fast'")


def test_the_help_says_what_each_figure_means_and_gives_examples(capsys):
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(["compare", "--help"])

    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for words in ("(last - first) / (output tokens - 1)", "first event with non-empty text", "examples", "exit code"):
        assert words in text


def test_the_command_is_registered_without_loading_an_http_client():
    code = (
        "import sys, gateway.cli.compare; print(sorted({'aiohttp', 'asyncio', 'pydantic', 'torch'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout == "[]\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(bar):
    bar.begin("merged round 1/2", 4)
    bar.advance(failed=False)
    bar.advance(failed=True)
    bar.end()


def test_progress_is_one_rewritten_line_on_a_terminal_and_leaves_it_clean():
    stream = Terminal()
    show(ProgressBar(stream))

    states = stream.getvalue().split("\r\x1b[K")
    assert states[-2:] == ["merged round 1/2 [############............] 2/4, 1 failed", ""]
    assert "\n" not in stream.getvalue()


def test_progress_is_silent_without_a_terminal_unless_asked_for():
    silent, forced = io.StringIO(), io.StringIO()
    show(ProgressBar(silent))
    show(ProgressBar(forced, forced=True))

    assert silent.getvalue() == ""
    assert forced.getvalue() == "merged round 1/2 [############............] 2/4, 1 failed\n"
