"""References to environment variables inside strings: `${VAR}`, `$VAR`, `${VAR:-default}`, `$$` for a dollar sign.

Every string of every source goes through here, so no reference ever reaches an upstream as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_REFERENCE = re.compile(
    r"\$(?:(?P<dollar>\$)|(?P<name>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)(?::-(?P<default>[^{}]*))?\}|(?P<bad>\{))",
    re.ASCII,
)
_FOREIGN = re.compile(r"^(os\.environ/|\{env:|env:|\$\(|%[A-Za-z_]\w*%$)")


class UnresolvedReference(ValueError):
    """Says what is wrong with a reference; carries the variable's name but no value."""


def expand(text: str, environ: Mapping[str, str]) -> str:
    """All references replaced. A variable that is set but empty is empty, or its default if it has one."""

    def replacement(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        if match["bad"]:
            raise UnresolvedReference("has a ${ that is not ${NAME} or ${NAME:-default} (write $$ for a dollar sign)")
        name = match["name"] or match["braced"]
        value = environ.get(name)
        if match["default"] is not None and not value:
            return str(match["default"])
        if value is None:
            raise UnresolvedReference(
                f"refers to the environment variable {name}, which is not set (write $$ for a dollar sign)"
            )
        return value

    return _REFERENCE.sub(replacement, text)


def foreign_reference(text: str) -> bool:
    """A reference in some other program's notation, which would be taken literally."""
    return _FOREIGN.match(text) is not None
