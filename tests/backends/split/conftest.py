"""What most tests of split engines start with."""

from collections.abc import Iterator

import pytest
from split_doubles import SplitPair

from backends.protocol.messages import (
    TransferMode,
)

MODES: list[TransferMode] = ["layer", "request"]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> TransferMode:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def pair() -> Iterator[SplitPair]:
    made = SplitPair()
    made.connect()
    yield made
    made.close()
