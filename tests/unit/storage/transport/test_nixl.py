"""The nixl plane under the negotiated transport: the conformance suite, in one process."""

from __future__ import annotations

import pytest

from tests.unit.storage.transport.transport_conformance import LIMITS, TransportConformance
from tierkv.storage.errors import ConfigError
from tierkv.storage.transport.base import Transport, TransportLimits
from tierkv.storage.transport.nixl import NixlPlane
from tierkv.storage.transport.planes import NegotiatedTransport

KEY = bytes(range(32))


def nixl(limits: TransportLimits = LIMITS) -> NixlPlane:
    """A plane, or the reason why this machine cannot have one."""
    try:
        return NixlPlane("127.0.0.1", limits=limits)
    except ConfigError as error:
        pytest.skip(str(error))


class TestNixl(TransportConformance):
    path = "nixl"

    def open_transport(self, limits: TransportLimits = LIMITS) -> Transport:
        return NegotiatedTransport(KEY, planes=[nixl(limits)], limits=limits)
