"""The handoff against a model of all that is around it: every order of events of a small world, random ones of a large.

No block is lost, none is free while a living process may write to it, every request ends once and no later than its
deadline, and no first token comes twice: `handoff_world` asserts it after each event.
"""

import copy
from collections import deque

from handoff_world import Action, World
from hypothesis import given, settings
from hypothesis import strategies as st


def explore(world: World, *, max_depth: int) -> int:
    """Every state that can be reached, each settled once; returns how many."""
    seen = {world.fingerprint()}
    frontier: deque[tuple[World, int]] = deque([(world, 0)])
    while frontier:
        state, depth = frontier.popleft()
        copy.deepcopy(state).settle()
        if depth == max_depth:
            continue
        for action in list(state.actions()):
            after = copy.deepcopy(state)
            after.act(action)
            name = after.fingerprint()
            if name not in seen:
                seen.add(name)
                frontier.append((after, depth + 1))
    return len(seen)


def test_pd_04_every_order_of_events_with_two_prefill_sides_and_one_request():
    """Whatever one request can live through, failover included."""
    assert explore(World(max_requests=1, num_blocks=6, max_connects=3), max_depth=10) > 300


def test_pd_04_every_order_of_events_with_two_requests():
    assert explore(World(max_requests=2, num_blocks=4, max_connects=2), max_depth=7) > 300


@settings(max_examples=250, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=20, max_size=120))
def test_pd_04_random_orders_of_events_with_many_requests(picks: list[int]):
    world = World(max_requests=40, num_blocks=9, max_active=3, max_connects=12)
    world.connect("p")
    for pick in picks:
        actions: list[Action] = list(world.actions())
        world.act(actions[pick % len(actions)])
    world.settle()
