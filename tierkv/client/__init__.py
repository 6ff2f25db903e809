"""The client of the daemon; needs no torch."""

from tierkv.client.async_client import AsyncClient
from tierkv.client.client import Client
from tierkv.client.errors import DaemonAwayError, RefusedError
from tierkv.client.handshake import socket_path
from tierkv.client.settings import ChecksumPolicy, ClientSettings

__all__ = [
    "AsyncClient",
    "ChecksumPolicy",
    "Client",
    "ClientSettings",
    "DaemonAwayError",
    "RefusedError",
    "socket_path",
]
