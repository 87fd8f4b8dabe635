"""Plans of parts: made once for all layers, of the right tables, and few of them kept."""

from backends.kv_transfer.part_cache import MAX_PARTS, PartCache, upwards
from backends.kv_transfer.runs import Run


def test_a_plan_is_made_once_for_the_same_tables_and_range():
    made: list[list[Run]] = []
    cache = PartCache(4, lambda runs: made.append(runs) or len(made))
    source, target = [0, 1], (5, 6)

    assert [cache.plan(source, target, 0, 8) for _ in range(3)] == [1, 1, 1]
    assert cache.plan(source, target, 0, 7) == 2
    assert cache.plan(list(source), target, 0, 8) == 3  # equal, but another table
    assert made[0] == [Run(0, 5, 2, 1, 1, 0, 4)]


def test_old_plans_are_let_go():
    cache = PartCache(4, lambda runs: runs)
    for _ in range(MAX_PARTS + 10):
        cache.plan([0], [1], 0, 4)

    assert len(cache._known) == MAX_PARTS


def test_runs_downwards_on_both_sides_are_one_piece_of_memory():
    assert upwards(Run(9, 5, 3, -1, -1, 0, 4)) == Run(7, 3, 3, 1, 1, 0, 4)
    assert upwards(Run(9, 5, 3, -1, 1, 0, 4)) == Run(9, 5, 3, -1, 1, 0, 4)
    assert upwards(Run(9, 5, 1, 1, 1, 2, 3)) == Run(9, 5, 1, 1, 1, 2, 3)
