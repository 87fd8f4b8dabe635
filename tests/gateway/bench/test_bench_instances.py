"""A comparison with several instances of a role: they are one process to it, and never a part of one."""

from __future__ import annotations

import pytest

from gateway.bench.client import find_processes
from gateway.bench.instances import peaks_by_role, role_of
from gateway.bench.rows import Peaks

INFO = {"num_threads": 2, "device": "cpu", "kv_cache_dtype": "bf16", "block_size": 16}


@pytest.mark.parametrize(
    ("name", "role"),
    [("prefill", "prefill"), ("prefill-0", "prefill"), ("merged-12", "merged"), ("decode-1[int8]", "decode-1[int8]")],
)
def test_an_instance_has_its_roles_name_and_a_number(name: str, role: str):
    assert role_of(name) == role


def test_peaks_of_a_role_are_sums_and_an_engine_variant_is_none_of_it():
    one = Peaks(memory_bytes=100, kv_blocks=5, num_blocks=64)
    peaks = {"decode-0": one, "decode-1": one, "prefill": one, "decode-0[int8]": one}
    found = peaks_by_role(peaks, ["decode-0", "decode-1", "prefill", "merged"])

    assert found["decode"] == Peaks(memory_bytes=200, kv_blocks=10, num_blocks=128)
    assert found["prefill"] == one
    assert "merged" not in found


def test_a_role_of_which_one_instance_is_silent_has_no_peaks_rather_than_small_ones():
    one = Peaks(memory_bytes=100)
    assert peaks_by_role({"decode-0": one}, ["decode-0", "decode-1"]) == {}
    assert peaks_by_role({"decode-0": one, "decode-1": Peaks()}, [])["decode"] == Peaks()


def test_threads_of_a_roles_instances_are_added_and_what_differs_is_not_known():
    instances = [
        {"role": "decode", "name": "decode-0", "info": {**INFO, "role": "decode"}},
        {"role": "decode", "name": "decode-1", "info": {**INFO, "role": "decode", "block_size": 32}},
        {"role": "prefill", "name": "prefill", "info": {**INFO, "role": "prefill", "device": "cuda:0"}},
    ]
    found = find_processes({"instances": instances, "pairs": [{"prefill": "prefill", "decode": "decode-0"}]})

    assert {role: process.num_threads for role, process in found.items()} == {"decode": 4, "prefill": 2}
    assert (found["decode"].block_size, found["decode"].kv_cache_dtype) == (None, "bf16")
    assert (found["decode"].device, found["prefill"].device) == ("cpu", "cuda:0")
