"""The text of one answer while its tokens arrive: whole characters only, nothing of a stop string.

Knows nothing of requests. What it says in all is the same whether one listens token by token or only at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.text.stop_strings import StopFilter
from backends.text.token_text import TextStream


class Detokenizer:
    """Special tokens have no text. One thread uses it."""

    def __init__(self, stream: TextStream, stop: Sequence[str] = ()) -> None:
        self._stream = stream
        self._filter = StopFilter(stop)

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text; nothing of it or behind it is ever given out."""
        return self._filter.matched_stop

    def push(self, token_id: int) -> str:
        """New text that is certain by now."""
        if self.matched_stop is not None:
            return ""
        return self._filter.push(self._stream.push(token_id))

    def finish(self) -> str:
        """The rest: held back characters, unless they turn out to complete a stop string."""
        if self.matched_stop is not None:
            return ""
        text = self._filter.push(self._stream.finish())
        return text + self._filter.finish()
