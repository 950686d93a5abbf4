"""Every transport passes what a user's own must pass."""

from __future__ import annotations

import pytest

from streamrl.choices import TRANSPORTS
from streamrl.testing.transports import TransportConformance

TOGETHER = {"test_every_process_can_load_it_without_torch": None}  # in tests/test_own_choices.py, all at once
SETTINGS = {"memory": {"verify_every": 1}, "delta": {"verify_every": 1}}


class OnTheSharedServer(TransportConformance):
    """One server for all of them, which has the first model again before each test."""

    @pytest.fixture(autouse=True)
    def _shared(self, request, model_folders):
        if "bit_by_bit" in request.node.name:
            self.address = request.getfixturevalue("fresh_server").address
        self.model = model_folders[0]


for _name in TRANSPORTS.names:
    _class = f"Test{_name.capitalize()}"

    _own = {"name": _name, "settings": SETTINGS.get(_name, {}), **TOGETHER}
    globals()[_class] = type(_class, (OnTheSharedServer,), _own)


class TestBroadcastOverLazy(OnTheSharedServer):
    """With NCCL's manners."""

    name = "broadcast"
    locals().update(TOGETHER)

    @pytest.fixture(autouse=True)
    def _lazy(self, lazy):
        pass
