"""The runner against a scripted gateway: exact timings, order of what is sent, and every way a request can fail."""

from __future__ import annotations

import asyncio

import pytest
from bench_fake_gateway import (
    DONE,
    PING,
    FakeGateway,
    Script,
    run_comparison,
    sse,
    text_chunk,
    usage_chunk,
    whole_answer,
)

from gateway.bench.client import Refused
from gateway.bench.options import CompareError, CompareOptions, Warmth, WrongMode
from gateway.bench.rows import Peaks
from gateway.bench.summary import summarise
from gateway.core.types import CacheMode
from support.progress_log import ProgressLog

MERGED, SPLIT = CacheMode.MERGED, CacheMode.SPLIT


def options(**changes):
    defaults = {"modes": (MERGED,), "num_requests": 1, "num_rounds": 1, "prompt_tokens": 8, "output_tokens": 11}
    return CompareOptions(**{**defaults, **changes})


def is_warm_up(gateway):
    return len(gateway.completions()) == 1


async def only_row(answers, **changes):
    gateway = FakeGateway()
    gateway.answers = lambda mode, body: whole_answer(body) if is_warm_up(gateway) else answers(mode, body)
    comparison = await run_comparison(gateway, options(**changes))
    ((row,),) = [one.rows for one in comparison.passes]
    return row


async def test_ttft_and_tpot_are_those_of_the_script():
    script = [
        (0.1, sse({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})),
        (0.1, PING),
        (0.1, text_chunk("")),
        (0.2, text_chunk("five tokens ")),
        (1.0, text_chunk("and six more")),
        (0.5, text_chunk("", "length")),
        (0.0, usage_chunk(8, 11, cached_tokens=4)),
        (0.25, PING + DONE),
    ]

    row = await only_row(lambda mode, body: Script(script, seconds_before_end=0.25))

    assert row.outcome == "ok"
    assert row.ttft_seconds == pytest.approx(0.5)
    assert row.tpot_seconds == pytest.approx(1.5 / 10)  # 11 tokens by usage, though there were two chunks with text
    assert row.end_to_end_seconds == pytest.approx(2.5)
    assert (row.text, row.num_text_chunks) == ("five tokens and six more", 2)
    assert (row.prompt_tokens, row.completion_tokens, row.cached_tokens) == (8, 11, 4)


@pytest.mark.parametrize("size", [1, 4, 100])
async def test_mt_05_blanks_are_counted_by_usage_not_by_what_they_look_like(size):
    """100 tokens that are blanks, in chunks of any size: words, characters and chunks are all other numbers."""
    pieces = [text_chunk(" " * size) for _ in range(100 // size)]
    script = [(0.5, text_chunk("")), *((0.01, piece) for piece in pieces), (0.0, text_chunk("", "length"))]
    script.append((0.0, usage_chunk(8, 100) + DONE))

    row = await only_row(lambda mode, body: Script(script), output_tokens=100)

    assert (row.outcome, row.text, row.completion_tokens) == ("ok", " " * 100, 100)
    assert row.ttft_seconds == pytest.approx(0.51)
    if size < 100:
        assert row.tpot_seconds == pytest.approx((len(pieces) - 1) * 0.01 / 99)


async def test_several_events_in_one_network_chunk_share_its_instant():
    burst = text_chunk("a") + text_chunk("b")
    script = [(0.5, burst), (1.0, text_chunk("c", "length") + usage_chunk(8, 11) + DONE)]

    row = await only_row(lambda mode, body: Script(script))

    assert (row.ttft_seconds, row.tpot_seconds) == (pytest.approx(0.5), pytest.approx(0.1))


async def test_an_answer_in_one_chunk_has_no_tpot():
    row = await only_row(lambda mode, body: Script([(1.0, text_chunk("all", "length") + usage_chunk(8, 11) + DONE)]))

    assert (row.outcome, row.ttft_seconds, row.tpot_seconds) == ("ok", pytest.approx(1.0), None)


async def test_what_nobody_says_of_cached_tokens_stays_unknown():
    row = await only_row(lambda mode, body: whole_answer(body, cached_tokens=None))

    assert row.cached_tokens is None


ERROR_EVENT = sse({"error": {"message": "engine died", "type": "server_error"}})
FAILING = {
    "an error event": (Script([(0.0, text_chunk("a")), (0.0, ERROR_EVENT)]), "error", "engine died"),
    "a named error event": (Script([(0.0, sse({"what": 1}, event="error"))]), "error", "error event"),
    "503": (Script(status=503, body={"error": {"message": "split is down"}}), "error", "HTTP 503: split is down"),
    "no [DONE]": (Script([(0.0, text_chunk("a", "length") + usage_chunk(8, 11))]), "error", "ended early"),
    "no finish reason": (Script([(0.0, text_chunk("a") + usage_chunk(8, 11) + DONE)]), "error", "ended early"),
    "no usage": (Script([(0.0, text_chunk("a", "stop") + DONE)]), "error", "no usage"),
    "a short answer": (Script([(0.0, text_chunk("a", "stop") + usage_chunk(8, 3) + DONE)]), "error", "3 output tokens"),
    "an abort": (Script([(0.0, text_chunk("a", "abort") + usage_chunk(8, 3) + DONE)]), "aborted", "abort"),
    "a cut connection": (Script([(0.0, text_chunk("a"))], breaks=True), "error", "connection"),
    "no stream": (Script(body={"choices": []}), "error", "application/json, not a stream"),
}


@pytest.mark.parametrize("name", FAILING)
async def test_mt_06_every_failure_is_counted_apart_and_part_of_no_figure(name):
    script, outcome, words = FAILING[name]
    gateway = FakeGateway()
    num_answers = 0

    def answers(mode, body):
        nonlocal num_answers
        num_answers += 1
        return script if num_answers == 2 else whole_answer(body)  # the first is the warm-up

    gateway.answers = answers
    comparison = await run_comparison(gateway, options(num_requests=3))
    (column,) = summarise(comparison, (MERGED,), seed=0).modes

    failed, *good = comparison.rows(MERGED)
    assert (failed.outcome, [row.outcome for row in good]) == (outcome, ["ok", "ok"])
    assert words in failed.error
    assert (column.num_ok, column.num_failed, column.errors) == (2, {outcome: 1}, {failed.error: 1})
    assert not summarise(comparison, (MERGED,), seed=0).is_clean


async def test_an_answer_that_never_ends_is_a_timeout():
    row = await only_row(lambda mode, body: Script([(0.0, text_chunk("a"))], hangs=True), timeout_seconds=0.2)

    assert (row.outcome, row.error) == ("timeout", "no whole answer within 0.2 s")


@pytest.mark.parametrize(("served", "words"), [("merged", "X-Cache-Mode is merged"), (None, "X-Cache-Mode is missing")])
async def test_an_answer_in_another_mode_ends_the_run(served, words):
    gateway = FakeGateway()
    gateway.answers = lambda mode, body: Script(whole_answer(body).chunks, mode=served if mode == "split" else "asked")

    with pytest.raises(WrongMode, match=f"asked for split, .*{words}"):
        await run_comparison(gateway, options(modes=(MERGED, SPLIT)))


async def test_a_fallback_in_the_middle_of_a_concurrent_pass_ends_the_run():
    gateway = FakeGateway()
    gateway.answers = lambda mode, body: Script(
        whole_answer(body).chunks, mode="split" if len(gateway.completions()) == 4 else "asked"
    )

    with pytest.raises(WrongMode):
        await run_comparison(gateway, options(num_requests=6, concurrency=3))


async def test_a_mode_whose_warm_up_fails_is_marked_and_the_other_goes_on():
    gateway = FakeGateway()
    gateway.answers = lambda mode, body: (
        whole_answer(body) if mode == "merged" else Script(status=503, body={"error": {"message": "split is down"}})
    )

    comparison = await run_comparison(gateway, options(modes=(MERGED, SPLIT), num_requests=2))
    merged, split = summarise(comparison, (MERGED, SPLIT), seed=0).modes

    assert (merged.num_ok, merged.has_failed) == (2, False)
    assert (split.num_ok, split.num_not_sent, split.has_failed) == (0, 2, True)
    assert list(split.errors) == ["the warm-up request failed: HTTP 503: split is down"]
    assert len(gateway.prompts("split")) == 1  # nothing more was sent to it


def steps(gateway):
    """What was asked, in order: runs of completions are counted."""
    told = []
    for what, detail in gateway.log:
        step = detail[0] if what == "completion" else f"{what} {detail}" if what == "reset" else what
        if told and told[-1][0] == step:
            told[-1][1] += 1
        else:
            told.append([step, 1])
    return [tuple(step) for step in told]


async def test_cold_clears_the_caches_before_and_after_the_warm_up():
    gateway = FakeGateway()
    await run_comparison(gateway, options(modes=(MERGED, SPLIT), num_requests=3))

    a_pass = [("reset True", 1), ("{}", 1), ("reset True", 1), ("{}", 3), ("engines", 1)]
    expected = [(step.format(mode), n) for mode in ("merged", "split") for step, n in a_pass]
    assert steps(gateway)[1:] == expected  # the first is the question for threads


async def test_warm_primes_with_the_measured_prompts_and_then_takes_new_peaks():
    gateway = FakeGateway()
    await run_comparison(gateway, options(num_requests=2, warmth=Warmth.WARM))

    assert steps(gateway)[1:] == [("reset True", 1), ("merged", 3), ("reset False", 1), ("merged", 2), ("engines", 1)]
    warm_up, *prompts = gateway.prompts("merged")
    assert prompts[:2] == prompts[2:]
    assert warm_up not in prompts


async def test_both_modes_get_identical_prompts_and_rounds_alternate():
    gateway = FakeGateway()
    comparison = await run_comparison(gateway, options(modes=(MERGED, SPLIT), num_requests=2, num_rounds=2))

    order = [(one.round_index, one.mode) for one in comparison.passes]
    assert order == [(0, MERGED), (0, SPLIT), (1, SPLIT), (1, MERGED)]
    assert gateway.prompts("merged") == gateway.prompts("split")
    assert len({tuple(prompt) for prompt in gateway.prompts("split")}) == 6  # two rounds of a warm-up and two


async def test_mt_06_the_warm_up_is_not_among_the_rows():
    comparison = await run_comparison(FakeGateway(), options(num_requests=4))

    assert [row.index for row in comparison.rows(MERGED)] == [0, 1, 2, 3]


async def test_concurrency_is_the_number_of_requests_in_flight():
    gateway = FakeGateway()

    def answers(mode, body):
        if len(gateway.completions()) == 2:  # the warm-up is alone
            gateway.barrier = asyncio.Barrier(3)
        return whole_answer(body)

    gateway.answers = answers
    comparison = await run_comparison(gateway, options(num_requests=9, concurrency=3))

    assert [row.outcome for row in comparison.rows(MERGED)] == ["ok"] * 9
    assert gateway.most_in_flight == 3


async def test_a_request_is_due_when_its_place_becomes_free():
    gateway = FakeGateway()
    gateway.answers = lambda mode, body: Script([(0.0, chunk) for _, chunk in whole_answer(body).chunks], 2.0)

    comparison = await run_comparison(gateway, options(num_requests=3))

    rows = comparison.rows(MERGED)
    assert [row.intended_at_seconds for row in rows] == [0.0, 2.0, 4.0]
    assert [row.sent_at_seconds for row in rows] == [0.0, 2.0, 4.0]
    (one,) = comparison.passes
    assert (one.wall_seconds, one.client_cpu_seconds) == (6.0, 3.0)


TIMINGS = {
    "queue_seconds": 0.25, "prefill_seconds": 0.5, "transfer_seconds": 0.4, "transfer_overlapped_seconds": 0.3,
    "transfer_bytes": 2048, "decode_wait_seconds": 0.125, "decode_seconds": 1.0, "end_to_end_seconds": 9.0,
}  # fmt: skip


async def test_timings_and_peaks_of_the_gateway_are_taken_over():
    gateway = FakeGateway()
    gateway.timings["split"] = TIMINGS
    gateway.engines = {
        "prefill": {"peak_memory_bytes": 100, "peak_blocks_in_use": 7, "num_blocks": 64},
        "decode": {"peak_memory_bytes": 200, "peak_blocks_in_use": 9, "num_blocks": 64},
        "merged": {"peak_memory_bytes": 9000, "peak_blocks_in_use": 1},
    }

    comparison = await run_comparison(gateway, options(modes=(SPLIT,), num_requests=2))
    (split,) = summarise(comparison, (SPLIT,), seed=0).modes

    assert comparison.notices == []
    assert split.peaks["decode"] == Peaks(memory_bytes=200, kv_blocks=9, num_blocks=64)
    assert set(split.peaks) == {"prefill", "decode"}
    assert split.peak_memory_bytes == 300
    assert split.transfers is not None
    assert (split.transfers.num_bytes, split.transfers.seconds) == (4096, pytest.approx(0.8))
    assert split.transfers.overlapped_share == pytest.approx(0.75)
    assert split.breakdown is not None
    assert split.breakdown.decode_wait_seconds == 0.125
    assert split.breakdown.decode_seconds_per_token == pytest.approx(0.1)


async def test_missing_records_are_said_and_do_not_fail_the_requests():
    gateway = FakeGateway()
    gateway.engines = {"merged": {"peak_memory_bytes": 1}}
    comparison = await run_comparison(gateway, options(num_requests=2))

    assert all(row.is_ok and row.timings is None for row in comparison.rows(MERGED))
    assert ["2 requests without a record" in notice for notice in comparison.notices] == [True]


async def test_a_process_that_gives_no_figures_is_named():
    gateway = FakeGateway()
    gateway.timings["split"] = TIMINGS
    gateway.engines = {"prefill": {"peak_memory_bytes": 1}}

    comparison = await run_comparison(gateway, options(modes=(SPLIT,)))

    assert [notice.split(" gave")[0] for notice in comparison.notices] == ["decode"]


async def test_a_gateway_without_peaks_is_compared_with_a_notice():
    gateway = FakeGateway()
    gateway.refused = {"/v1/admin/reset_peaks": 404, "/v1/engines": 404}
    gateway.timings["merged"] = TIMINGS

    comparison = await run_comparison(gateway, options())
    (column,) = summarise(comparison, (MERGED,), seed=0).modes

    assert len(comparison.notices) == 2
    assert column.num_ok == 1
    assert (column.peaks, column.peak_memory_bytes) == ({}, None)


async def test_a_gateway_that_goes_away_leaves_what_was_measured_until_then():
    gateway = FakeGateway()
    gateway.gone_after_completions = 4 + 1  # the first pass is whole, then one warm-up

    comparison = await run_comparison(gateway, options(modes=(MERGED, SPLIT), num_requests=3))
    merged, split = summarise(comparison, (MERGED, SPLIT), seed=0).modes

    assert (merged.num_ok, merged.has_failed) == (3, False)
    assert (split.num_ok, split.num_not_sent) == (0, 3)
    assert ["no gateway answers" in message for message in split.errors] == [True]


async def test_a_refused_key_ends_the_run_and_is_never_shown():
    gateway = FakeGateway()
    gateway.refused = {"/v1/models": 401}  # this gateway echoes the header

    with pytest.raises(Refused) as refused:
        await run_comparison(gateway, options(), key="sk-very-secret")

    assert "sk-very-secret" not in str(refused.value)
    assert "--key or KVGATE_KEY" in str(refused.value)


async def test_the_key_and_the_mode_travel_in_headers():
    gateway = FakeGateway()
    await run_comparison(gateway, options(), key=" sk-1\n")

    assert {headers["Authorization"] for headers in gateway.headers} == {"Bearer sk-1"}


async def test_the_first_model_that_serves_every_mode_is_taken():
    gateway = FakeGateway()
    gateway.models = [
        {"id": "far", "modes": []},
        {"id": "half", "modes": ["merged"]},
        {"id": "both", "modes": ["merged", "split"], "vocab_size": 64},
    ]

    comparison = await run_comparison(gateway, options(modes=(MERGED, SPLIT)))

    assert comparison.model.id == "both"
    assert all(32 <= token_id < 64 for prompt in gateway.prompts("split") for token_id in prompt)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "huge"}, "'huge' is not served here. Available: small"),
        ({"model": "small", "prompt_tokens": 1020}, "exceed the 1024"),
    ],
)
async def test_a_model_that_does_not_fit_is_refused_before_anything_is_sent(changes, words):
    gateway = FakeGateway()

    with pytest.raises(CompareError, match=words):
        await run_comparison(gateway, options(**changes))
    assert gateway.completions() == []


async def test_no_model_for_both_modes_is_refused():
    gateway = FakeGateway()
    gateway.models = [{"id": "half", "modes": ["merged"]}]

    with pytest.raises(CompareError, match="no model here serves merged and split"):
        await run_comparison(gateway, options(modes=(MERGED, SPLIT)))
    with pytest.raises(CompareError, match="served in merged only"):
        await run_comparison(gateway, options(modes=(MERGED, SPLIT), model="half"))


async def test_progress_counts_every_request_and_its_failure():
    progress = ProgressLog()
    gateway = FakeGateway()
    gateway.answers = lambda mode, body: (
        Script(status=500, body={}) if len(gateway.completions()) == 3 else whole_answer(body)
    )
    await run_comparison(gateway, options(num_requests=2), progress=progress)

    assert progress.lines == [("merged round 1/1", 2), "ok", "failed", "end"]
