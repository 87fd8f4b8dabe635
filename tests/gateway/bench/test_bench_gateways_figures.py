"""Figures, table and JSON of `kvgate bench gateway` from values that were made up. No server."""

from __future__ import annotations

import json

import pytest

from gateway.bench.bootstrap import resampled
from gateway.bench.cells import times_better
from gateway.bench.gateways.asking import Answer, Place, is_whole, plain_text, stream_text
from gateway.bench.gateways.command import timer_text
from gateway.bench.gateways.figures import FIGURES, ROWS, drift, estimate, ratio_to, slope_kib, value_of
from gateway.bench.gateways.measures import MEASURES, Site, ask_pair, closed_loop, memory_marks, stepwise
from gateway.bench.gateways.own import buckets_of, quantile_between, total_of
from gateway.bench.gateways.results import Burst, GatewayResult, GatewayRun, MemoryPoint, Pair, Round
from gateway.bench.gateways.sizes import QUICK, Kind, Sizes, request_body
from gateway.bench.gateways.table import render, to_json
from gateway.bench.gateways.upstream import END, Upstream
from gateway.bench.process import BenchError
from gateway.cli.bench_gateway import ROW_NAMES

BY_NAME = {figure.name: figure for figure in FIGURES}


def pairs(added_ms, num=20):
    """Direct requests take 1 ms; the first token comes when half of what is added has passed."""
    return [
        Pair(
            direct_first=0.001, direct_whole=0.001, via_first=0.001 + added_ms / 2000,
            via_whole=0.001 + added_ms / 1000, via_came_first=False,
        )
        for _ in range(num)
    ]  # fmt: skip


def points(*mebibytes, step=1000):
    return [MemoryPoint(num_requests=i * step, rss_bytes=m * 2**20, pss_bytes=2**20) for i, m in enumerate(mebibytes)]


def burst(num_errors=0):
    error = "peer, stream: HTTP 429: too many" if num_errors else ""
    return Burst(num_streams=500, num_errors=num_errors, first_error=error, max_open=500 - num_errors, seconds=7.0)


def run(name="kvgate", added_ms=1.0, rate=1000.0, **changes):
    values = {
        "is_own": name == "kvgate",
        "version": "1.0",
        "pairs": {kind: pairs(added_ms) for kind in Kind},
        "rounds": {kind: [Round(direct=3000.0, via=rate)] * 5 for kind in Kind},
        "memory": points(50, 60, 60, 60, 60),
        "burst": burst(),
        "direct_burst": burst(),
    }
    return GatewayRun(name=name, **{**values, **changes})


def result(*runs, **changes):
    values = {"rows": list(ROWS), "sizes": Sizes(), "is_quick": False, "seed": 1, "facts": {"processor": "a"}}
    return GatewayResult(runs=list(runs), **{**values, **changes})


def line_of(text, label):
    return next(line for line in text.splitlines() if line.startswith(label)).removeprefix(label).split()


def test_what_is_added_is_the_difference_within_each_pair():
    one = run(added_ms=2.0)

    assert value_of(BY_NAME["first-stream-p50"], [one]) == pytest.approx(1.0)
    assert value_of(BY_NAME["whole-stream-p50"], [one]) == pytest.approx(2.0)
    assert value_of(BY_NAME["whole-plain-p95"], [one]) == pytest.approx(2.0)


def test_a_high_percentile_is_of_the_differences():
    added = [*pairs(1.0, num=90), *pairs(9.0, num=10)]
    one = run(pairs={Kind.STREAM: added})

    assert value_of(BY_NAME["whole-stream-p50"], [one]) == pytest.approx(1.0)
    assert value_of(BY_NAME["whole-stream-p95"], [one]) == pytest.approx(9.0)
    assert value_of(BY_NAME["whole-plain-p50"], [one]) is None


def test_an_interval_needs_values_and_holds_the_figure():
    estimated = estimate(BY_NAME["whole-stream-p50"], [run(pairs={Kind.STREAM: [*pairs(1.0), *pairs(2.0)]})], seed=1)
    assert estimated is not None
    assert estimated.low <= estimated.value <= estimated.high
    assert (estimated.low, estimated.high) != (None, None)
    few = resampled([1.0, 2.0], max, seed=1)
    assert few is not None
    assert (few.value, few.low, few.high) == (2.0, None, None)
    assert resampled([], max, seed=1) is None


def test_own_values_before_and_after_the_peers_count_together_in_ratios():
    shown = result(run(added_ms=1.0, rate=1000), run("peer", added_ms=6.0, rate=500), run(added_ms=2.0, rate=3000))

    assert ratio_to(shown, BY_NAME["whole-stream-p50"], shown.runs[1]) == pytest.approx(4.0)
    assert ratio_to(shown, BY_NAME["rate-plain"], shown.runs[1]) == pytest.approx(4.0)
    assert drift(shown, BY_NAME["rate-plain"]) == pytest.approx(2.0)
    assert drift(shown, BY_NAME["whole-plain-p50"]) == pytest.approx(1.0)


def test_nothing_is_divided_by_a_gateway_that_seemed_to_add_no_time():
    shown = result(run(added_ms=-0.1), run("peer"), run(added_ms=-0.1))

    assert ratio_to(shown, BY_NAME["whole-stream-p50"], shown.runs[1]) is None
    assert drift(shown, BY_NAME["whole-stream-p50"]) is None
    assert ratio_to(shown, BY_NAME["rate-plain-direct"], shown.runs[1]) is None
    assert times_better(2.0, 4.0, "less") == times_better(4.0, 2.0, "more") == 2.0


def test_growth_is_that_of_the_later_half():
    assert slope_kib(points(50, 90, 60, 61, 62, 63)) == pytest.approx(1024)
    assert slope_kib(points(50, 90, 60, 60, 60, 60)) == pytest.approx(0)
    assert slope_kib(points(50, 60)) is None
    assert slope_kib(points(50, 60, 70, 80, 90, step=10)) is None


def test_the_table_shows_values_intervals_ratios_and_counts():
    text = render(result(run(rate=1000), run("LiteLLM", added_ms=10.0, rate=50), run(rate=1100)))

    titles = next(line for line in text.splitlines() if "again" in line)
    assert titles.split() == ["kvgate", "again", "drift", "LiteLLM", "x"]
    assert line_of(text, "plain at 16 at once") == ["req/s", "1,000", "1,100", "+10.0%", "50.0", "21.00"]
    assert "1,000..1,000" in text
    assert line_of(text, "500 streams at once: errors") == ["0", "0", "-", "0", "-"]
    assert line_of(text, "resident memory, all processes") == ["MiB", "50.0", "50.0", "+0.0%", "50.0", "1.00"]
    assert "FAILED" not in text


def test_a_missing_peer_is_a_column_of_dashes_with_its_reason():
    text = render(result(run(), run(), missing={"portkey": "not found; install it"}))

    assert line_of(text, "plain at 16 at once")[-2:] == ["-", "-"]
    assert "missing: portkey: not found; install it" in text


def test_failures_are_said_and_have_no_figure():
    failed = run("peer", pairs={}, problems={"latency, stream": "peer, stream: HTTP 500: no"}, burst=burst(3))
    shown = result(run(), failed, run())
    text = render(shown)

    assert shown.has_failed
    assert line_of(text, "added to the first token, stream, p50")[-2:] == ["-", "-"]
    assert line_of(text, "500 streams at once: errors")[-2:] == ["3", "-"]
    assert line_of(text, "  until the last had ended")[-2:] == ["-", "-"]
    assert "FAILED: peer, latency, stream: peer, stream: HTTP 500: no" in text
    assert "FAILED: peer, 3 of the streams at once, such as: peer, stream: HTTP 429: too many" in text
    assert not result(run()).has_failed
    assert result(run(failure="never ready")).has_failed


def test_only_the_rows_that_were_asked_for_are_shown():
    text = render(result(run(), rows=["memory"]))

    assert "resident memory" in text
    assert "req/s" not in text
    assert "added to" not in text


def test_a_quick_run_says_so():
    assert "say nothing about speed" in render(result(run(), sizes=QUICK, is_quick=True))
    assert "QUICK" not in render(result(run()))


def test_json_has_raw_values_figures_and_ratios():
    document = json.loads(to_json(result(run(), run("LiteLLM", added_ms=10.0), run())))

    assert len(document["result"]["runs"][0]["pairs"]["stream"]) == 20
    assert document["figures"]["LiteLLM"]["whole-plain-p50"]["value"] == pytest.approx(10.0)
    assert document["figures"]["kvgate"]["whole-plain-p50"]["num_pairs"] == 40
    assert document["ratios"]["LiteLLM"]["whole-plain-p50"] == pytest.approx(10.0)
    assert document["drift"]["memory"] == 0
    assert document["units"]["rate-plain"] == "req/s"


def test_every_row_has_measures_and_figures_and_a_flag():
    assert {figure.row for figure in FIGURES} == {row for row, _ in MEASURES.values()} == set(ROWS) == set(ROW_NAMES)
    assert len(BY_NAME) == len(FIGURES)


# --------------------------------------------------------------------------------------------- answers and upstream


def test_an_answer_is_whole_only_with_every_word_and_its_end():
    upstream = Upstream(3)
    stream = b"".join(upstream.frames) + END

    assert is_whole(upstream.plain, Kind.PLAIN, 3)
    assert is_whole(stream, Kind.STREAM, 3)
    assert not is_whole(upstream.plain, Kind.PLAIN, 4)
    assert not is_whole(upstream.plain[:-1], Kind.PLAIN, 3)
    assert not is_whole(stream.removesuffix(END), Kind.STREAM, 3)
    assert not is_whole(stream.replace(b"word ", b"", 1), Kind.STREAM, 3)
    assert plain_text(upstream.plain) == stream_text(stream) == "word word word "


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"data: [DONE]\n\n", "ended early"),
        (b'data: {"error":{"message":"no more"}}\n\ndata: [DONE]\n\n', "error event: no more"),
    ],
)
def test_a_stream_without_its_end_or_with_an_error_is_refused(body, words):
    with pytest.raises(BenchError, match=words):
        stream_text(body)


def test_a_plain_answer_of_another_shape_is_refused():
    with pytest.raises(BenchError, match="can't be read"):
        plain_text(b'{"choices":[]}')


def test_both_kinds_ask_the_same():
    plain, stream = (json.loads(request_body(kind)) for kind in (Kind.PLAIN, Kind.STREAM))

    assert (plain.pop("stream"), stream.pop("stream")) == (False, True)
    assert plain == stream


# ------------------------------------------------------------------------------------------------- the own gateway

METRICS = """\
# HELP kvgate_requests_total Requests answered.
kvgate_requests_total{dialect="openai_chat",outcome="ok"} 30.0
kvgate_requests_total{dialect="openai_chat",outcome="error"} 2.0
kvgate_requests_created{dialect="openai_chat"} 1e9
lag_bucket{le="0.01"} 90.0
lag_bucket{le="0.1"} 100.0
lag_bucket{le="+Inf"} 100.0
"""


def test_counters_are_added_up_over_their_labels():
    assert total_of(METRICS, "kvgate_requests_total") == 32
    assert total_of(METRICS, "kvgate_request") == 0


def test_a_quantile_is_of_what_came_between_two_readings():
    buckets = buckets_of(METRICS, "lag")
    assert buckets == {0.01: 90.0, 0.1: 100.0, float("inf"): 100.0}

    assert quantile_between({}, buckets, 45) == pytest.approx(0.005)
    assert quantile_between({}, buckets, 95) == pytest.approx(0.055)
    assert quantile_between({0.01: 90.0, 0.1: 90.0, float("inf"): 90.0}, buckets, 50) == pytest.approx(0.055)
    assert quantile_between({}, {0.01: 0.0, float("inf"): 4.0}, 99) == 0.01


def test_a_quantile_of_nothing_is_unknown():
    buckets = buckets_of(METRICS, "lag")
    assert quantile_between(buckets, buckets, 99) is None
    assert quantile_between({}, {}, 99) is None


# --------------------------------------------------------------------------------------------------- small things


class ScriptedClient:
    """Answers at once, with times that tell the place."""

    def __init__(self):
        self.asked = []

    async def ask(self, place, kind):
        self.asked.append((place.name, kind))
        return Answer(1.0, 2.0) if place.name == "direct" else Answer(3.0, 4.0)


def site(client, sizes=QUICK):
    places = {"direct": Place("direct", "http://d"), "via": Place("via", "http://v")}
    return Site(client=client, upstream_url="", sizes=sizes, random=None, progress=None, pid=0, **places)


@pytest.mark.parametrize("via_comes_first", [True, False])
async def test_a_pair_knows_which_answer_is_which_in_either_order(via_comes_first):
    client = ScriptedClient()
    pair = await ask_pair(site(client), Kind.STREAM, via_comes_first=via_comes_first)

    assert (pair.direct_first, pair.direct_whole, pair.via_first, pair.via_whole) == (1.0, 2.0, 3.0, 4.0)
    assert pair.via_came_first is via_comes_first
    assert [name for name, _ in client.asked] == (["via", "direct"] if via_comes_first else ["direct", "via"])


async def test_a_closed_loop_sends_each_request_once():
    client = ScriptedClient()
    await closed_loop(site(client), Place("via", ""), [Kind.PLAIN, Kind.STREAM, Kind.PLAIN])

    assert sorted(client.asked) == [("via", "plain"), ("via", "plain"), ("via", "stream")]


@pytest.mark.parametrize(("num", "marks"), [(100, [0, 25, 50, 75, 100]), (10, [0, 2, 5, 7, 10]), (2, [0, 1, 2])])
def test_memory_is_read_after_every_share_of_exactly_the_requests_asked_for(num, marks):
    assert memory_marks(Sizes(num_memory_requests=num, num_memory_points=4)) == marks


def test_a_bar_is_drawn_a_few_times_and_says_if_it_was_left():
    class Bar:
        def __init__(self):
            self.marks = []

        def begin(self, label, total):
            self.marks.append(total)

        def advance(self, *, failed):
            self.marks.append("x" if failed else ".")

        def end(self):
            self.marks.append("end")

    bar = Bar()
    assert list(stepwise(bar, "a", 100)) == list(range(100))
    assert bar.marks == [20, *["."] * 20, "end"]

    left = Bar()
    for done in stepwise(left, "a", 3):
        if done == 1:
            break
    assert left.marks[0:2] == [3, "."]


def test_the_timer_says_what_it_can_tell_apart():
    assert timer_text().startswith("resolution ")
