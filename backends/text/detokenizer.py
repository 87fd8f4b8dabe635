"""The text of one answer while its tokens arrive: whole characters only, nothing of a stop string.

Knows nothing of requests. What it says in all is the same whether one listens token by token or only at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.text.stop_strings import StopFilter
from backends.text.token_text import TextStream


class Detokenizer:
    """Special tokens have no text. One thread uses it.

    Of the text of the first `min_tokens` tokens no stop string is completed, special tokens counted. `opening` is
    text that the prompt began the answer with: it comes first, and no stop string is looked for in it.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str] = (), *, min_tokens: int = 0, opening: str = "") -> None:
        self._stream = stream
        self._filter = StopFilter(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._opening = opening
        self.num_characters = len(opening)  # decoded so far, given out or not

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text; nothing of it or behind it is ever given out."""
        return self._filter.matched_stop

    def push(self, token_id: int) -> str:
        """New text that is certain by now."""
        if self.matched_stop is not None:
            return ""
        self._num_tokens += 1
        return self._opened(self._take(self._stream.push(token_id)))

    def finish(self) -> str:
        """The rest: held back characters, unless they turn out to complete a stop string."""
        if self.matched_stop is not None:
            return ""
        text = self._take(self._stream.finish())
        return self._opened(text + self._filter.finish())

    def _opened(self, text: str) -> str:
        opening, self._opening = self._opening, ""
        return opening + text

    def _take(self, text: str) -> str:
        self.num_characters += len(text)
        return self._filter.push(text, may_match=self._num_tokens > self._min_tokens)
