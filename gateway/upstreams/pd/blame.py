"""Whose fault it is when a transfer of KV between two servers fails and neither says why. Pure bookkeeping of names.

A server that fails with several partners, or with one that works with others, is at fault; one that fails with a single
partner may be that one's victim. So an ill prefill server doesn't take the decode servers with it, nor the reverse.
"""

from __future__ import annotations

from collections.abc import Collection


class Suspicions:
    """Of all servers of both sides. `is_sole`: one of each, which are used together or not at all."""

    def __init__(self, *, is_sole: bool) -> None:
        self._is_sole = is_sole
        # Server -> partners that it has failed with since its last success -> whether these worked with others since.
        # In the order of their last failures.
        self._partners: dict[str, dict[str, bool]] = {}

    def failed_together(self, prefill: str, decode: str) -> set[str]:
        """Those of the two that it is told of: none, one or both."""
        for one, other in ((prefill, decode), (decode, prefill)):
            self._partners[one] = {other: False} | self._partners.pop(one, {})
        return {one for one, other in ((prefill, decode), (decode, prefill)) if self._is_at_fault(one, other)}

    def worked_together(self, prefill: str, decode: str) -> None:
        for name in (prefill, decode):
            self._partners.pop(name, None)
        for partners in self._partners.values():
            partners.update((name, True) for name in (prefill, decode) if name in partners)

    def better_apart(self, names: Collection[str], partners: Collection[str]) -> set[str]:
        """Those that have failed with each of these partners, none of which has worked since: others will show whose
        fault it is. Of all of them, all but the one that hasn't failed for longest.
        """
        found = [name for name in self._partners if name in names and self._is_unproven(name, partners)]
        return set(found if len(found) < len(names) else found[1:])

    def _is_unproven(self, name: str, partners: Collection[str]) -> bool:
        return bool(partners) and all(self._partners[name].get(partner) is False for partner in partners)

    def _is_at_fault(self, one: str, other: str) -> bool:
        partners = self._partners[one]
        return self._is_sole or len(partners) > 1 or partners[other]
