"""What the process entry sets before anything heavy is loaded."""

from __future__ import annotations

from backends.__main__ import set_threads
from backends.config import EngineConfig


def test_threads_are_those_of_the_configuration_and_spin_briefly():
    environ = {"OMP_NUM_THREADS": "64"}
    set_threads(EngineConfig(role="merged", model="m", num_threads=3), environ)

    assert environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == "3"
    assert environ["GOMP_SPINCOUNT"] == "50000"
    assert "OMP_WAIT_POLICY" not in environ


def test_a_wait_policy_that_the_user_has_set_is_kept():
    environ = {"OMP_WAIT_POLICY": "ACTIVE"}
    set_threads(EngineConfig(role="merged", model="m"), environ)

    assert environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert environ == {"OMP_WAIT_POLICY": "ACTIVE"}
