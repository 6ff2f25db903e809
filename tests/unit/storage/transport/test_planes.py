"""The negotiated transport against the conformance suite, without planes."""

from __future__ import annotations

from tests.unit.storage.transport.transport_conformance import (
    LIMITS,
    TransportConformance,
)
from tierkv.storage.transport.base import Transport, TransportLimits
from tierkv.storage.transport.planes import NegotiatedTransport

KEY = bytes(range(32))


class TestWithoutPlanes(TransportConformance):
    def open_transport(self, limits: TransportLimits = LIMITS) -> Transport:
        return NegotiatedTransport(KEY, limits=limits)
