"""The keys of one pool in an etcd v3, by the standard client of its gateway (package etcd3gw).

Owns the client and its connections; the only file that imports it. Knows no members: names,
values and leases are opaque. Invariants: every request has a timeout; whatever goes wrong in the
client, the network or the answer is a TierIOError of one line. Called by storage.pool.etcd.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from tierkv.storage.errors import ConfigError, TierClosedError, TierIOError
from tierkv.storage.pool.config import MEMBERS_MAX, Address

KEYS_MAX = 4 * MEMBERS_MAX
"""Keys that one listing holds at most."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One key under the prefix as it was listed."""

    name: str
    value: bytes
    mod_revision: int
    lease: int


class EtcdKeys:
    """The keys under one prefix, by etcd's standard gateway. Not thread-safe.

    Each method waits at most twice `timeout_s` (connecting, answering), and as long again for each
    further byte; TierIOError when etcd did not do it, TierClosedError when `closed` was set.
    """

    def __init__(self, address: Address, prefix: str, timeout_s: float) -> None:
        try:
            import etcd3gw
        except ImportError as error:
            raise ConfigError(
                "pool: etcd is configured, but its client is not installed; install tierkv[etcd] "
                "or list the members"
            ) from error
        self.address = address
        self.prefix = prefix.rstrip("/")
        self.closed = False
        self._timeout_s = timeout_s
        self._client = etcd3gw.Etcd3Client(
            address.host, address.port, timeout=timeout_s, api_path="/v3/"
        )
        # A proxy of the environment is for the internet, not for the cluster's coordinator.
        self._client.session.trust_env = False
        self._errors = etcd3gw.exceptions

    def list(self) -> tuple[list[Listed], int]:
        """Up to KEYS_MAX entries by name, and etcd's revision."""
        first, end = f"{self.prefix}/".encode(), f"{self.prefix}0".encode()
        found = self._ask(
            "list members",
            "/kv/range",
            {"key": _text(first), "range_end": _text(end), "limit": KEYS_MAX},
        )
        try:
            listed = [
                Listed(
                    base64.b64decode(entry["key"])[len(first) :].decode("utf-8", "replace"),
                    base64.b64decode(entry.get("value", "")),
                    int(entry["mod_revision"]),
                    int(entry.get("lease", 0)),
                )
                for entry in found.get("kvs", [])
            ]
            return listed, int(found["header"]["revision"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._odd("list members") from error

    def put(self, name: str, value: str, lease: int, mod_revision: int) -> None:
        """Write one key if it still has `mod_revision`; 0: if it does not exist."""
        key = _text(f"{self.prefix}/{name}".encode())
        body = {
            "compare": [
                {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": mod_revision}
            ],
            "success": [
                {"request_put": {"key": key, "value": _text(value.encode()), "lease": lease}}
            ],
        }
        if self._ask("announce", "/kv/txn", body).get("succeeded") is not True:
            raise TierIOError(
                f"etcd {self.address}: announce {name!r}: the key was changed meanwhile"
            )

    def grant(self, lease_s: float) -> int:
        """A new lease."""
        found = self._ask("grant a lease", "/lease/grant", {"TTL": max(1, round(lease_s)), "ID": 0})
        try:
            return int(found["ID"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._odd("grant a lease") from error

    def renew(self, lease: int) -> bool:
        """False when it has ended."""
        found = self._ask("renew the lease", "/lease/keepalive", {"ID": lease})
        try:
            return int(found["result"].get("TTL", 0)) > 0
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._odd("renew the lease") from error

    def revoke(self, lease: int) -> None:
        """End a lease and remove its keys."""
        self._ask("revoke the lease", "/lease/revoke", {"ID": lease})

    def close(self) -> None:
        """Let the connections go."""
        self.closed = True
        self._client.session.close()

    def _ask(self, what: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.closed:
            raise TierClosedError(f"etcd {self.address}: {what}: this node is closing")
        try:
            found = self._client.post(self._client.get_url(path), json=body)
        except self._errors.ConnectionTimeoutError as error:
            reason = (
                f"no answer in {self._timeout_s:g} s; check that etcd is well and not overloaded"
            )
            raise TierIOError(f"etcd {self.address}: {what}: {reason}") from error
        except self._errors.ConnectionFailedError as error:
            raise TierIOError(
                f"etcd {self.address}: {what}: no connection; check pool.etcd, and that etcd runs "
                "there and its client port can be reached"
            ) from error
        except (self._errors.Etcd3Exception, OSError, ValueError) as error:
            # OSError: what the HTTP library raises; ValueError: an answer that is no JSON.
            detail = getattr(error, "detail_text", None) or str(error)
            raise TierIOError(
                f"etcd {self.address}: {what}: {' '.join(detail.split())[:200]}; "
                "check pool.etcd and etcd's log"
            ) from error
        if not isinstance(found, dict):
            raise self._odd(what)
        return found

    def _odd(self, what: str) -> TierIOError:
        return TierIOError(
            f"etcd {self.address}: {what}: the answer is not an etcd v3.4 gateway's; "
            "check pool.etcd"
        )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
