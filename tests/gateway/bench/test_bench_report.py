"""Summary, table, JSON and CSV: figures of hand-made rows, and what a reader is told."""

from __future__ import annotations

import csv
import io

import msgspec
import pytest

from backends.protocol.messages import Timings
from gateway.bench.explanation import EXPLANATION
from gateway.bench.export import COLUMNS, to_csv, to_json
from gateway.bench.header import resources_text
from gateway.bench.options import CompareOptions, Warmth
from gateway.bench.pairs import compare_texts, first_difference, paired_rows
from gateway.bench.report import render
from gateway.bench.rows import Comparison, PassResult, Peaks, Process, RequestRow, ServedModel
from gateway.bench.summary import summarise
from gateway.core.types import CacheMode

MERGED, SPLIT = CacheMode.MERGED, CacheMode.SPLIT
URL = "http://127.0.0.1:8000"


def row(mode=MERGED, index=0, **changes):
    values = {
        "mode": mode, "round_index": 0, "index": index, "outcome": "ok", "intended_at_seconds": 0.0,
        "sent_at_seconds": 0.0, "ended_at_seconds": 2.0, "ttft_seconds": 0.1, "tpot_seconds": 0.01,
        "end_to_end_seconds": 2.0, "prompt_tokens": 100, "completion_tokens": 50, "cached_tokens": 0, "text": "same",
    }  # fmt: skip
    return RequestRow(**{**values, **changes})


def failed(mode=MERGED, index=0, outcome="error", error="HTTP 503: down"):
    return row(mode, index, outcome=outcome, error=error, ttft_seconds=99.0, completion_tokens=7)


def comparison(merged, split, **changes):
    passes = [
        PassResult(mode=MERGED, round_index=0, rows=merged, wall_seconds=4.0, client_cpu_seconds=1.0),
        PassResult(mode=SPLIT, round_index=0, rows=split, wall_seconds=4.0),
    ]
    return Comparison(model=ServedModel(id="small"), passes=passes, **changes)


def summary_of(compared, modes=(MERGED, SPLIT)):
    return summarise(compared, modes, seed=0)


def shown(compared, **changes):
    return render(compared, summary_of(compared), CompareOptions(**changes), URL)


def line_of(text, label):
    (line,) = [line for line in text.splitlines() if line.startswith(label)]
    return " ".join(line.removeprefix(label).split())


def test_mt_06_rates_and_percentiles_are_those_of_the_answered_requests():
    merged = [row(index=i, ttft_seconds=0.1 * (i + 1), cached_tokens=25) for i in range(3)] + [failed(index=3)]
    column = summary_of(comparison(merged, [])).modes[0]

    assert column.ttft_p50_seconds == pytest.approx(0.2)
    assert column.ttft_p95_seconds == pytest.approx(0.29)
    assert column.output_tokens_per_second == pytest.approx(150 / 4)
    assert column.total_tokens_per_second == pytest.approx(450 / 4)
    assert column.request_tokens_per_second == pytest.approx(150 / 6)
    assert column.prefix_hit_rate == pytest.approx(0.25)
    assert column.client_cpu_share == pytest.approx(0.25)


def test_what_nobody_knows_is_none_and_shown_as_a_dash():
    merged = [row(cached_tokens=None, tpot_seconds=None)]
    compared = comparison(merged, [row(SPLIT)])
    column = summary_of(compared).modes[0]

    assert (column.tpot_p50_seconds, column.prefix_hit_rate, column.transfers, column.breakdown) == (None,) * 4
    assert (column.peak_memory_bytes, column.peaks) == (None, {})
    assert line_of(shown(compared), "TPOT p50, ms") == "- 10.00 -"
    assert line_of(shown(compared), "peak memory in all, MiB") == "- -"


def test_memory_in_all_needs_every_process():
    compared = comparison([row()], [row(SPLIT)])
    compared.passes[1].peaks = {"prefill": Peaks(memory_bytes=2**20)}
    assert summary_of(compared).modes[1].peak_memory_bytes is None

    compared.passes[1].peaks["decode"] = Peaks(memory_bytes=2**21, kv_blocks=3, num_blocks=8)
    text = shown(compared)

    assert line_of(text, "peak memory in all, MiB") == "- 3.0"
    assert line_of(text, "peak KV blocks decode") == "3 of 8"  # and nothing in the column of merged


def test_peaks_are_the_highest_of_all_rounds():
    compared = comparison([row()], [])
    compared.passes[0].peaks = {"merged": Peaks(memory_bytes=5, kv_blocks=9), "decode": Peaks(memory_bytes=77)}
    compared.passes.append(PassResult(mode=MERGED, round_index=1, peaks={"merged": Peaks(memory_bytes=8, kv_blocks=2)}))

    assert summary_of(compared).modes[0].peaks == {"merged": Peaks(memory_bytes=8, kv_blocks=9)}


def test_pairs_are_the_prompts_answered_in_both_modes():
    merged = [row(index=0), failed(index=1), row(index=2), row(index=0, round_index=1)]
    split = [row(SPLIT, 2), row(SPLIT, 1), row(SPLIT, 0), failed(SPLIT, 3)]

    pairs = paired_rows(merged, split)

    assert [(one.index, two.index) for one, two in pairs] == [(0, 0), (2, 2)]


def test_differences_are_split_less_merged_whatever_the_order_of_modes():
    merged = [row(index=i, ttft_seconds=0.1) for i in range(6)]
    split = [row(SPLIT, i, ttft_seconds=0.3) for i in range(6)]
    compared = comparison(merged, split)

    for modes in ((MERGED, SPLIT), (SPLIT, MERGED)):
        difference = summary_of(compared, modes).differences["ttft_p50_seconds"]
        assert difference is not None
        assert difference.value == pytest.approx(0.2)
        assert difference.is_clear
    assert line_of(shown(compared), "TTFT p50, ms") == "100.00 300.00 +200.00 [+200.00, +200.00]"
    assert line_of(shown(compared), "TPOT p50, ms") == "10.00 10.00 +0.00 [+0.00, +0.00] no clear difference"


def test_one_mode_alone_has_no_differences():
    summary = summary_of(comparison([row()], []), (MERGED,))

    assert (summary.differences, summary.texts) == ({}, None)
    assert summary.is_clean


@pytest.mark.parametrize(
    ("one", "two", "position"),
    [("abc", "abc", None), ("abc", "abd", 2), ("ab", "abc", 2), ("", "x", 0), ("xa", "ya", 0)],
)
def test_the_first_character_that_differs_is_found(one, two, position):
    assert first_difference(one, two) == position


def test_unequal_texts_name_the_first_request_and_character():
    merged = [row(index=i, text="abcd") for i in range(3)]
    split = [row(SPLIT, i, text=text) for i, text in enumerate(["abcd", "abXd", "aXcd"])]
    equality = compare_texts(paired_rows(merged, split))

    assert (equality.num_equal, equality.num_pairs) == (1, 3)
    assert (equality.first_index, equality.first_position) == (1, 2)
    assert "texts: 1 of 3 equal; first difference in request 1 of round 1 at character 2" in shown(
        comparison(merged, split)
    )
    assert "texts: 3 of 3 equal\n" in shown(comparison(merged, merged_as_split(merged)))


def merged_as_split(rows):
    return [msgspec.structs.replace(one, mode=SPLIT) for one in rows]


def test_a_failed_mode_is_a_visible_row_with_its_cause():
    split = [failed(SPLIT, 0), failed(SPLIT, 1), failed(SPLIT, 2, outcome="timeout", error="no whole answer")]
    compared = comparison([row()], split)
    text = shown(compared)

    assert line_of(text, "requests ok / failed") == "1 / 0 0 / 3 FAILED"
    assert line_of(text, "  errors") == "0 2"
    assert line_of(text, "  timeouts") == "0 1"
    assert "FAILED: split has no figures" in text
    assert "failed in split, 2 x: HTTP 503: down" in text
    assert "texts: nothing to compare" in text
    assert not summary_of(compared).is_clean


def test_transfers_and_phases_are_shown_for_split():
    timings = Timings(prefill_seconds=0.5, transfer_seconds=0.4, transfer_overlapped_seconds=0.3, transfer_bytes=2**21)
    text = shown(comparison([row(timings=Timings())], [row(SPLIT, timings=timings)]))

    assert line_of(text, "KV moved, MiB") == "0.0 2.0"
    assert line_of(text, "  overlapped with prefill, %") == "- 75.0"
    assert line_of(text, "median prefill, ms") == "0.00 500.00"


def process(num_threads):
    return Process(num_threads=num_threads, device="cpu", weight_dtype="fp32", kv_cache_dtype="fp32")


@pytest.mark.parametrize(
    ("threads", "words"),
    [
        ({"merged": 2, "prefill": 1, "decode": 1}, "threads equal: merged 2 on cpu, split 1+1 on cpu"),
        ({"merged": 2, "prefill": 2, "decode": 2}, "threads NOT EQUAL: merged 2 on cpu, split 2+2 on cpu"),
        ({"merged": 2, "prefill": 2}, "not known, so equal resources are not certain"),
        ({}, "not known, so equal resources are not certain"),
    ],
)
def test_unequal_resources_are_said(threads, words):
    assert words in resources_text((MERGED, SPLIT), {role: process(count) for role, count in threads.items()})


def test_mt_06_the_heading_states_what_was_compared():
    text = shown(
        comparison([row()], [row(SPLIT)], gateway_version="9.9", notices=["a notice"]),
        seed=42, concurrency=3, num_requests=5, warmth=Warmth.WARM,
    )  # fmt: skip

    text = " ".join(text.split())  # long facts are wrapped
    for words in (f"small at {URL}", "seed 42", "closed loop, 3 in flight", "5 a round", "warm:", "gateway 9.9"):
        assert words in text
    assert "notice: a notice" in text
    assert "cold:" in shown(comparison([row()], []))


def test_mt_06_the_queue_is_told_apart_from_the_first_token_and_the_report_says_what_each_holds():
    """The same prefill behind another queue: TTFT grows, the prefill does not, and the reader can see why."""
    short = [row(ttft_seconds=0.6, timings=Timings(queue_seconds=0.1, prefill_seconds=0.5))]
    long = [row(SPLIT, ttft_seconds=2.5, timings=Timings(queue_seconds=2.0, prefill_seconds=0.5))]
    compared = comparison([*short, failed(index=1)], long)
    text = shown(compared, concurrency=8)

    assert line_of(text, "TTFT p50, ms").startswith("600.00 2500.00")
    assert line_of(text, "median queue, ms") == "100.00 2000.00"
    assert line_of(text, "median prefill, ms") == "500.00 500.00"
    assert line_of(text, "requests ok / failed").startswith("1 / 1 1 / 0")
    words = " ".join(text.split())
    assert "closed loop, 8 in flight" in words
    assert "TTFT includes the queue of the engine" in words
    assert "one warm-up request before each is not measured" in words
    assert "queue = admitted -> scheduled" in EXPLANATION
    assert "part of no figure" in EXPLANATION


def test_mt_06_a_machine_reads_the_same_parts():
    merged = [row(timings=Timings(queue_seconds=0.1, prefill_seconds=0.5)), failed(index=1, outcome="timeout")]
    compared = comparison(merged, [row(SPLIT)])
    document = msgspec.json.decode(to_json(compared, summary_of(compared), CompareOptions(concurrency=8), URL))

    figures = document["summary"]["modes"][0]
    assert document["options"]["concurrency"] == 8
    assert (figures["breakdown"]["queue_seconds"], figures["breakdown"]["prefill_seconds"]) == (0.1, 0.5)
    assert (figures["num_ok"], figures["num_failed"]) == (1, {"timeout": 1})
    assert figures["ttft_p50_seconds"] == 0.1
    assert {"queue_seconds", "outcome", "intended_at_seconds", "sent_at_seconds"} < set(COLUMNS)


def test_json_holds_options_figures_and_every_raw_row():
    merged = [row(index=0, timings=Timings(prefill_seconds=0.5)), failed(index=1)]
    compared = comparison(merged, [row(SPLIT)])
    document = msgspec.json.decode(to_json(compared, summary_of(compared), CompareOptions(seed=5), URL))

    assert (document["url"], document["options"]["seed"], document["options"]["modes"]) == (URL, 5, ["merged", "split"])
    one, other = document["comparison"]["passes"][0]["rows"]
    assert (one["timings"]["prefill_seconds"], one["timings"]["queue_seconds"], one["text"]) == (0.5, 0.0, "same")
    assert (other["outcome"], other["timings"]) == ("error", None)
    assert document["summary"]["modes"][0]["num_failed"] == {"error": 1}
    assert document["summary"]["differences"]["ttft_p50_seconds"]["num_pairs"] == 1


def test_csv_has_one_line_per_request():
    merged = [row(text="a,b\n"), failed(index=1)]
    compared = comparison(merged, [row(SPLIT, timings=Timings(transfer_bytes=9))])

    lines = list(csv.DictReader(io.StringIO(to_csv(compared))))

    assert list(lines[0]) == list(COLUMNS)
    assert [(line["mode"], line["index"], line["outcome"]) for line in lines] == [
        ("merged", "0", "ok"), ("merged", "1", "error"), ("split", "0", "ok"),
    ]  # fmt: skip
    assert (lines[0]["transfer_bytes"], lines[2]["transfer_bytes"]) == ("", "9")
    assert lines[0]["text_sha256"] != lines[2]["text_sha256"]
