"""The negotiated transport over the ucx plane, against the suite of every transport."""

from __future__ import annotations

import pytest

from tests.unit.storage.transport.transport_conformance import LIMITS, TransportConformance
from tierkv.storage.clock import SystemClock
from tierkv.storage.errors import ConfigError
from tierkv.storage.transport.base import Transport, TransportLimits
from tierkv.storage.transport.planes import NegotiatedTransport
from tierkv.storage.transport.ucx import UcxPlane, load_library

try:
    load_library()
except ConfigError as reason:
    pytest.skip(str(reason), allow_module_level=True)

KEY = bytes(range(32))


class TestUcx(TransportConformance):
    path = "ucx"

    def open_transport(self, limits: TransportLimits = LIMITS) -> Transport:
        plane = UcxPlane("127.0.0.1", limits=limits, clock=SystemClock())
        return NegotiatedTransport(KEY, limits=limits, planes=[plane])
