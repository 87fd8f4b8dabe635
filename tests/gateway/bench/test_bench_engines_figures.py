"""What a figure is, exactly: measures on a scripted clock, ratios and bounds on given values."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from gateway.bench.cells import number
from gateway.bench.engines.figures import FIGURES, MEASURES, MEMORY, ROWS, Server, Unsupported, gaps_within
from gateway.bench.engines.results import BenchResult, EngineRun, bounds, drift, pooled_median, ratio
from gateway.bench.engines.roofline import (
    Footprint,
    Machine,
    ModelShape,
    decode_bound,
    fastest,
    prefill_bound,
    read_shape,
    weight_bytes,
)
from gateway.bench.engines.samples import Sample
from gateway.bench.engines.sizes import QUICK, Prompts, Sizes
from gateway.bench.engines.table import render, to_json
from gateway.bench.memory import largest_of_tree, memory_of, process_tree
from gateway.bench.process import BenchError

SIZES = Sizes(num_streams=2, num_load_requests=4, num_stalled_streams=2, stream_warm_up=1, stream_quiet=20)
MORE = next(figure for figure in FIGURES if figure.name == "decode")
LESS = next(figure for figure in FIGURES if figure.name == "stall")


class ScriptedClient:
    """A server whose answers take the seconds given: to the first token, and from each to the next."""

    def __init__(self, *, first=2.0, gap=0.5, first_of=None):
        self.now = 0.0
        self.first, self.gap, self.first_of = first, gap, first_of or {}
        self.prompts: list[list[int]] = []

    def clock(self):
        return self.now

    async def complete(self, prompt, max_tokens):
        self.prompts.append(list(prompt))
        sample = Sample(self.now)
        self.now += self.first_of.get(len(self.prompts), self.first)
        for index in range(max_tokens):
            self.now += self.gap * (index > 0)
            sample.text_at.append(self.now)
        sample.last_at = sample.ended_at = self.now
        sample.prompt_tokens, sample.output_tokens = len(prompt), max_tokens
        return sample


def server(client, *, sizes=SIZES, max_streams=None):
    return Server(client, Prompts(1, range(1000, 9000)), sizes, max_streams)


async def test_decode_speed_leaves_the_time_to_the_first_token_out():
    values = await MEASURES["decode"](server(ScriptedClient(first=100.0, gap=0.25)), 0)

    assert values == {"decode": 4.0}


async def test_decode_after_a_long_prompt_sends_a_long_prompt():
    client = ScriptedClient(gap=0.5)

    assert await MEASURES["decode-long"](server(client), 0) == {"decode-long": 2.0}
    assert [len(prompt) for prompt in client.prompts] == [4096]


@pytest.mark.parametrize(("name", "num_tokens"), [("prefill", 1024), ("prefill-long", 4096)])
async def test_prefill_speed_is_prompt_tokens_by_time_to_first_token(name, num_tokens):
    assert await MEASURES[name](server(ScriptedClient(first=4.0)), 0) == {name: num_tokens / 4}


async def test_load_counts_output_alone_and_longer_load_everything():
    sizes = Sizes(num_streams=2, num_load_requests=4, load_prompt=3, medium_prompt=5, load_output=2)

    def client():
        return ScriptedClient(first=1.0, gap=1.0)  # 4 requests of 2 s, one after the other on this clock

    assert await MEASURES["load"](server(client(), sizes=sizes), 0) == {"load": 4 * 2 / 8}
    assert await MEASURES["load-long"](server(client(), sizes=sizes), 0) == {"load-long": 4 * (5 + 2) / 8}


async def test_the_second_request_with_the_same_prefix_is_a_share_of_the_first():
    client = ScriptedClient(first=2.0, first_of={2: 0.1})
    values = await MEASURES["prefix"](server(client), 0)

    assert values == pytest.approx({"prefix": 5.0, "prefix-first": 2000.0, "prefix-second": 100.0})
    first, second = client.prompts
    assert first[:4096] == second[:4096]
    assert first[4096:] != second[4096:]
    assert len(first) == len(second) == 4096 + 16


class StreamingClient(ScriptedClient):
    """Its streams advance together: one piece each per turn, and `slow` seconds a turn while a prompt is computed."""

    def __init__(self, *, gap, slow, num_pieces=1000):
        super().__init__(gap=gap)
        self.slow, self.num_pieces = slow, num_pieces
        self.is_busy = False
        self._turns = 0

    async def stream(self, prompt, max_tokens, sample, on_text):
        for _ in range(self.num_pieces):
            await asyncio.sleep(0)
            self._turns += 1
            if self._turns % 2 == 1:  # the first of the two streams moves the clock
                self.now += self.slow if self.is_busy else self.gap
            sample.text_at.append(self.now)
            on_text()

    async def complete(self, prompt, max_tokens):
        sample = Sample(self.now)
        self.is_busy = True
        for _ in range(6):
            await asyncio.sleep(0)
        self.is_busy = False
        sample.text_at.append(self.now)
        return sample


async def test_gaps_of_running_streams_are_told_apart_by_whether_a_prompt_is_computed():
    values = await MEASURES["stall"](server(StreamingClient(gap=0.01, slow=0.2)), 0)

    assert values["stall"] == pytest.approx(200)
    assert values["stall-alone"] == pytest.approx(10)


async def test_streams_that_end_before_the_long_prompt_is_answered_give_no_figure():
    with pytest.raises(BenchError, match="a running stream ended before"):
        await MEASURES["stall"](server(StreamingClient(gap=0.01, slow=0.2, num_pieces=2)), 0)


async def test_a_server_that_answers_one_at_a_time_has_no_running_streams():
    with pytest.raises(Unsupported, match="1 at a time"):
        await MEASURES["stall"](server(ScriptedClient(), max_streams=1), 0)


def test_a_gap_belongs_to_an_interval_that_it_overlaps_and_is_counted_whole():
    instants = [0.0, 1.0, 5.0, 6.0, 9.0]

    assert gaps_within(instants, 2.0, 5.5) == [4.0, 1.0]
    assert gaps_within(instants, 6.0, 6.5) == [3.0]
    assert gaps_within(instants, 9.0, 20.0) == []


def test_an_answer_in_one_piece_has_no_decode_speed():
    sample = Sample(0.0, text_at=[1.0], last_at=1.0, output_tokens=5)

    with pytest.raises(BenchError, match="in one piece"):
        _ = sample.decode_rate


def test_prompts_are_the_same_for_every_server_and_share_no_prefix():
    prompts = Prompts(1, range(1000, 9000))

    assert prompts.make(50, "a", 0) == Prompts(1, range(1000, 9000)).make(50, "a", 0)
    assert len({tuple(prompts.make(50, label, repeat)[:4]) for label in "abc" for repeat in range(3)}) == 9
    assert prompts.make(50, "a", 0) != Prompts(2, range(1000, 9000)).make(50, "a", 0)


def test_every_row_has_a_figure_and_every_figure_a_row():
    assert list(dict.fromkeys(figure.measure for figure in FIGURES)) == list(ROWS)
    assert MEMORY in ROWS
    assert all("{" not in figure.text(Sizes()) for figure in FIGURES)
    assert MORE.text(Sizes()) == "decode, 1 stream, 32-token prompt"


def test_a_ratio_above_one_is_always_in_favour_of_this_project():
    assert ratio(MORE, 200.0, 100.0) == 2.0
    assert ratio(LESS, 50.0, 100.0) == 2.0
    assert ratio(MORE, None, 100.0) is None
    assert ratio(MORE, 200.0, None) is None
    assert ratio(LESS, 0.0, 1.0) is None


def engine_run(name, *, own, **values):
    return EngineRun(name=name, is_own=own, version="1", values={key.replace("_", "-"): v for key, v in values.items()})


def bench_result(*runs, rows=("decode", "stall"), **options):
    return BenchResult(
        rows=list(rows), num_repeats=3, is_quick=False, seed=1, sizes=options.pop("sizes", Sizes()),
        machine=options.pop("machine", None), shape=options.pop("shape", None), facts={"processor": "P"},
        runs=list(runs), **options,
    )  # fmt: skip


def test_the_own_value_is_the_median_of_both_runs_and_the_drift_their_difference():
    result = bench_result(
        engine_run("kvgate", own=True, decode=[100.0, 102.0, 101.0]),
        engine_run("vLLM", own=False, decode=[50.0, 1.0, 52.0]),
        engine_run("kvgate", own=True, decode=[111.0, 111.1, 112.0]),
    )

    assert pooled_median(result.own_runs, "decode") == 106.5
    assert drift(result, "decode") == pytest.approx(111.1 / 101 - 1)
    document = json.loads(to_json(result))
    assert document["ratios"]["vLLM"] == {"decode": 106.5 / 50, "stall": None, "stall-alone": None}
    assert document["result"]["runs"][1]["values"] == {"decode": [50.0, 1.0, 52.0]}
    assert document["medians"]["kvgate"]["decode"] == 106.5


def test_the_table_shows_both_own_runs_the_peer_and_the_ratio():
    result = bench_result(
        engine_run("kvgate", own=True, decode=[180.0], stall=[20.0]),
        engine_run("vLLM", own=False, decode=[60.0], stall=[2000.0]),
        engine_run("kvgate", own=True, decode=[180.0], stall=[20.0]),
    )
    lines = render(result).splitlines()

    title = next(line.split() for line in lines if " again " in line)
    assert title == ["kvgate", "again", "drift", "vLLM", "x"]
    row = next(line for line in lines if line.startswith("decode"))
    assert row.split("tok/s")[1].split() == ["180.0", "180.0", "+0.0%", "60.0", "3.00"]
    row = next(line for line in lines if line.startswith("token gap"))
    assert row.split(" ms ")[1].split() == ["20.0", "20.0", "+0.0%", "2,000", "100.00"]


def test_a_missing_peer_is_a_column_of_dashes_and_says_how_to_install_it():
    text = render(bench_result(engine_run("kvgate", own=True, decode=[180.0]), missing={"vllm": "install it with: X"}))

    row = next(line for line in text.splitlines() if line.startswith("decode"))
    assert row.split("tok/s")[1].split() == ["180.0", "-", "-"]
    assert "missing: vllm: install it with: X" in text


def test_what_failed_and_what_cannot_be_are_told_apart():
    run = engine_run("vLLM", own=False)
    run.problems["decode"], run.unsupported["stall"] = "HTTP 500: no", "it answers 1 at a time"
    result = bench_result(engine_run("kvgate", own=True, decode=[180.0]), run)

    assert "failed: vLLM, decode: HTTP 500: no" in render(result)
    assert "not measured: vLLM, stall: it answers 1 at a time" in render(result)
    assert result.has_failed
    run.problems.clear()
    assert not result.has_failed


def test_a_smoke_run_says_that_it_is_one():
    result = bench_result(engine_run("kvgate", own=True, decode=[180.0]), sizes=QUICK)
    result.is_quick = True

    assert "QUICK: small sizes, which say nothing about speed" in render(result)


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (1234.5, "1,234"), (12.34, "12.3"), (1.234, "1.23")])
def test_a_number_has_about_three_digits(value, text):
    assert number(value) == text


MACHINE = Machine(memory_read_bytes_per_second=1000.0, bf16_flops_per_second=1e6, num_threads=2)
SHAPE = ModelShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, num_matrix_values=100, num_head_values=50)


def test_decode_is_bound_by_the_bytes_of_weights_and_cache():
    bound = decode_bound("decode", 2.0, Footprint(weight_bytes=50.0, kv_bytes_per_token=5.0), 10.0, MACHINE)

    assert (bound.limit, bound.share) == (1000 / (50 + 10 * 5), 0.2)


def test_prefill_is_bound_by_products_of_weights_and_of_attention():
    # 2 x 100 weights x 3 tokens, one row of the head, 2 x 3^2 / 2 x 2 products x 4 heads x 8 x 2 layers.
    assert SHAPE.prefill_flops(3) == 2 * 100 * 3 + 2 * 50 + 2 * 2 * 9 / 2 * 4 * 8 * 2
    bound = prefill_bound("prefill", 300.0, SHAPE, 3, MACHINE)
    assert bound.limit == pytest.approx(3 * 1e6 / SHAPE.prefill_flops(3))


def test_the_better_of_two_measurements_of_each_speed_is_the_bound():
    other = Machine(memory_read_bytes_per_second=900.0, bf16_flops_per_second=2e6, num_threads=2)

    assert fastest(MACHINE, other) == Machine(
        memory_read_bytes_per_second=1000.0, bf16_flops_per_second=2e6, num_threads=2
    )


def test_keys_and_values_of_all_layers_are_read():
    assert SHAPE.kv_bytes_per_token(2) == 2 * 2 * 2 * 8 * 2


def test_bounds_are_drawn_from_medians_with_the_average_length_of_the_cache():
    run = engine_run("kvgate", own=True, decode=[1.0, 3.0, 2.0], prefill=[9.0])
    run.footprint = Footprint(weight_bytes=4.0, kv_bytes_per_token=1.0)
    result = bench_result(run, machine=MACHINE, shape=SHAPE)
    found = {bound.figure: bound for bound in bounds(result, result.own_runs)}

    assert found.keys() == {"decode", "prefill"}
    assert found["decode"].limit == 1000 / (4 + 32 + 128 / 2)
    assert found["decode"].reached == 2.0
    assert "reached  20.0 %" in render(result)


def safetensors(file, tensors):
    header = msgspec.json.encode({name: {"dtype": "F32", "shape": shape} for name, shape in tensors.items()})
    file.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.fixture
def model_folder(tmp_path):
    config = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": [10, 32], "a.weight": [32, 32], "b.weight": [64, 32], "norm.weight": [32]}
    safetensors(tmp_path / "model.safetensors", tensors)
    return tmp_path


def test_the_shape_of_a_model_is_read_from_its_files(model_folder):
    shape = read_shape(model_folder)

    assert shape == ModelShape(
        num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, num_matrix_values=96 * 32, num_head_values=320
    )
    assert weight_bytes(model_folder, shape, "bf16") == 2 * (96 * 32 + 320)
    assert weight_bytes(model_folder, shape, "int4") == 0.625 * 96 * 32 + 320


def test_a_head_of_its_own_takes_the_place_of_the_embedding(model_folder):
    safetensors(model_folder / "more.safetensors", {"lm_head.weight": [10, 32]})

    assert read_shape(model_folder).num_head_values == 320
    assert read_shape(model_folder).num_matrix_values == 96 * 32


def test_int4_with_the_values_of_a_gguf_reads_what_that_file_holds(model_folder):
    own = {"a.weight.q": [32, 32], "a.weight.d": [32, 1], "a.weight.m": [32, 1], "e.q8": [10, 32], "e.d8": [10, 1]}
    safetensors(model_folder / "quantized.safetensors", own)
    shape = read_shape(model_folder)

    assert shape.num_matrix_values == 96 * 32
    assert weight_bytes(model_folder, shape, "int4") == 512 + 2 * 32 + 2 * 32 + 320 + 2 * 10


def test_a_folder_without_the_usual_words_has_no_shape(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    assert read_shape(tmp_path) is None


def proc_folder(tmp_path, processes):
    for pid, parent, rss in processes:
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} 0 0")
        (folder / "smaps_rollup").write_text(f"0-1 ---p 0 00:00 0 [rollup]\nRss: {rss} kB\nPss: {rss // 2} kB\n")
    return tmp_path


def test_the_process_with_the_model_is_the_largest_of_the_tree(tmp_path):
    proc = proc_folder(tmp_path, [(10, 1, 100), (11, 10, 300), (12, 11, 900), (13, 1, 9999)])

    assert sorted(process_tree(10, proc)) == [10, 11, 12]
    memory = largest_of_tree(10, proc)
    assert (memory.pid, memory.rss_bytes, memory.pss_bytes) == (12, 900 * 1024, 450 * 1024)
    assert memory_of(99, proc) is None
