"""Several things at once of which none may fail. Knows nothing of what they do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator


@contextlib.asynccontextmanager
async def all_or_first_error() -> AsyncGenerator[asyncio.TaskGroup, None]:
    """A task group whose first error comes out as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
