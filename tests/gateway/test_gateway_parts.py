"""Parts that generations share: the same specification, the same part; closed by the last that used it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.parts import Parts


class Made:
    """Makes parts that remember whether they are closed."""

    def __init__(self):
        self.log: list[str] = []

    def of(self, name):
        def make():
            async def close():
                self.log.append(f"closed {name}")

            self.log.append(f"made {name}")
            return name, close

        return make


async def test_a_part_is_made_once_and_closed_with_its_last_user():
    parts, made = Parts(), Made()
    old, new = parts.user(), parts.user()
    assert old.take("a", made.of("a")) == new.take("a", made.of("a")) == "a"
    old.take("b", made.of("b"))

    await old.close()
    assert made.log == ["made a", "made b", "closed b"]
    await old.close()
    await new.close()
    assert made.log == ["made a", "made b", "closed b", "closed a"]


async def test_what_is_closed_is_made_anew():
    parts, made = Parts(), Made()
    for _ in range(2):
        user = parts.user()
        user.take(["no hash"], made.of("a"))
        await user.close()
    assert made.log == ["made a", "closed a"] * 2


async def test_the_last_taken_is_closed_first():
    parts, made = Parts(), Made()
    user = parts.user()
    for name in "abc":
        user.take(name, made.of(name))
    await user.close()
    assert made.log[3:] == ["closed c", "closed b", "closed a"]


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from("abcd")))))
async def test_open_are_exactly_the_parts_in_use(steps):
    parts, made, users = Parts(), Made(), []
    for ends, names in steps:
        if ends and users:
            await users.pop(0)[0].close()
        user = parts.user()
        for name in sorted(names):
            user.take(name, made.of(name))
        users.append((user, names))
        in_use = set().union(*(names for _, names in users))
        is_open = {name for name in "abcd" if made.log.count(f"made {name}") > made.log.count(f"closed {name}")}
        assert is_open == in_use
