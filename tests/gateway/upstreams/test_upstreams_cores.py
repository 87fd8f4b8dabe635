"""How many cores there are, which may be bound to, and who gets which."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.upstreams.engine import cores as module
from gateway.upstreams.engine.cores import available_cores, bindable_cores, divide


@pytest.mark.parametrize(("content", "most"), [("150000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", 10_000)])
def test_a_containers_quota_limits_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, most: int):
    (tmp_path / "cpu.max").write_text(content)
    monkeypatch.setattr(module, "CGROUP_CPU_MAX", tmp_path / "cpu.max")

    assert 1 <= available_cores() <= most


def test_under_a_quota_nobody_is_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_allowed", lambda: {4, 2, 9})

    assert bindable_cores(3) == (2, 4, 9)
    assert bindable_cores(2) is None


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(1, 64), st.integers(1, 16))
def test_no_core_is_given_twice_and_none_is_left_over(num_cores: int, num_instances: int):
    shares = divide(num_cores, num_instances, range(100, 100 + num_cores))
    bound = [cpu for share in shares for cpu in share.cpus or ()]

    assert len(shares) == num_instances
    assert all(share.num_threads >= 1 for share in shares)
    if num_cores >= num_instances:
        assert sum(share.num_threads for share in shares) == num_cores
        assert max(share.num_threads for share in shares) - min(share.num_threads for share in shares) <= 1
    if num_instances > 1 and num_cores >= num_instances:
        assert bound == list(range(100, 100 + num_cores))
        assert all(share.cpus is not None and len(share.cpus) == share.num_threads for share in shares)
    else:
        assert bound == []
