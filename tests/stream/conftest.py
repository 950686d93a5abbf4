"""What the tests of the wire share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamrl.config.replay import StreamConfig
from streamrl.stream.sockets import Dealer


@pytest.fixture
def connect() -> Iterator[Callable[..., Dealer]]:
    """`connect(address, stream, keys=None, name="peer")`: a Dealer that is closed at the end, however the test ends."""
    dealers: list[Dealer] = []

    def make(address: str, stream: StreamConfig, keys: Path | None = None, name: str = "peer") -> Dealer:
        dealers.append(Dealer(address, stream, keys, name))
        return dealers[-1]

    yield make
    for dealer in dealers:
        dealer.close()
