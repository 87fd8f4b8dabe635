"""How figures are written in the tables of `kvgate bench`. Pure: values in, text out."""

from __future__ import annotations

import textwrap
from typing import Literal

LINE_WIDTH = 112
UNKNOWN = "-"

Better = Literal["more", "less"]


def times_better(own: float | None, peer: float | None, better: Better) -> float | None:
    """How many times better the own value is, whichever direction is better. None where either is unknown or 0."""
    if not own or not peer:
        return None
    return own / peer if better == "more" else peer / own


def number(value: float | None) -> str:
    """Three digits are what such figures are good for."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share * 100:+.1f}%"


def times(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def fact_line(name: str, text: str) -> str:
    """One fact of a heading, wrapped under itself."""
    wrapper = textwrap.TextWrapper(LINE_WIDTH, subsequent_indent=" " * 17, break_long_words=False)
    wrapper.break_on_hyphens = False
    wrapper.initial_indent = f"  {name.ljust(15)}"
    return wrapper.fill(text)
