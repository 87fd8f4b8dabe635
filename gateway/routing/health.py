"""Whether a target is well, by the health checks that it is asked. Pure: outcomes in, changes out."""

from __future__ import annotations

MAX_FAILURES = 2  # in a row; one alone may be a packet that got lost


class Health:
    """Well until checks fail, and well again with the first that succeeds. Not known before the first."""

    def __init__(self) -> None:
        self.is_well: bool | None = None
        self.why = ""  # the last check failed; "" if it didn't
        self._num_failures = 0  # in a row

    @property
    def is_ill(self) -> bool:
        return self.is_well is False

    def checked(self, why: str) -> bool:
        """Take the outcome of a check, "" = success. True if that changes whether the target is asked."""
        was_ill = self.is_ill
        self.why = why
        self._num_failures = self._num_failures + 1 if why else 0
        if not why:
            self.is_well = True
        elif self._num_failures >= MAX_FAILURES:
            self.is_well = False
        return self.is_ill is not was_ill
