"""Which namespaces the daemon knows, and the number under which their pages are filed.

Owns namespaces.json and its content in memory. A page in a tier carries an owner, a u32; here it
gets its meaning: digest, fingerprint, tenant and page size. Knows no pages. Called by
tierkv.daemon.greeting (in a worker thread: it writes a file) and by whoever lists namespaces.

Invariants: a digest has one owner for ever; a number is never given twice, even when its
namespace was forgotten; the file is replaced whole and synced before a number is used.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tierkv.storage.errors import CapacityError, ConfigError, FormatVersionError
from tierkv.storage.identity import Fingerprint, from_json, namespace, to_json
from tierkv.storage.remote import POOL_OWNER
from tierkv.storage.tiers.nvme_layout import write_json
from tierkv.storage.types import NamespaceId

FORMAT = "tierkv-namespaces"
VERSION = 1
OWNER_MAX = POOL_OWNER - 1
"""The number above is that of pages kept for the pool: they belong to no namespace here."""
_FILE_BYTES_MAX = 256 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Namespace:
    """One namespace as it was first greeted."""

    owner: int
    """1 up; 0 is for pages without a namespace."""
    digest: NamespaceId
    fingerprint: str
    """As tierkv.storage.identity.to_json() writes it."""
    tenant: str
    page_bytes: int


class NamespaceRegistry:
    """See the module docstring. Thread-safe."""

    def __init__(self, path: Path, limit: int) -> None:
        """Read what is at `path`, if anything; at most `limit` namespaces are kept.

        Raises ConfigError when the file is damaged, FormatVersionError for another version's.
        """
        self._path = path
        self._limit = limit
        self._lock = threading.Lock()
        self._next = 1
        self._by_digest: dict[NamespaceId, Namespace] = {}
        self._load()

    def all(self) -> list[Namespace]:
        """Every namespace, in the order of its number."""
        with self._lock:
            return sorted(self._by_digest.values(), key=lambda known: known.owner)

    def find(self, digest: bytes) -> Namespace | None:
        """The namespace of a digest; None when it never was here."""
        with self._lock:
            return self._by_digest.get(NamespaceId(digest))

    def register(self, fingerprint: Fingerprint, tenant: str, page_bytes: int) -> Namespace:
        """The namespace of `fingerprint`, made durable first when it is new.

        Raises ConfigError when it was greeted with another page size (one of the two is wrong) or
        the file cannot be written, CapacityError past the limit.
        """
        digest = namespace(fingerprint)
        with self._lock:
            known = self._by_digest.get(digest)
            if known is not None:
                if known.page_bytes != page_bytes:
                    raise ConfigError(
                        f"hello: namespace {digest.hex()[:16]} has pages of {known.page_bytes} "
                        f"bytes, got page_bytes {page_bytes}; check the model's KV layout"
                    )
                return known
            if len(self._by_digest) >= self._limit:
                raise CapacityError(
                    f"hello: {self._limit} namespaces are known already; drop some or raise "
                    "namespaces_max"
                )
            new = Namespace(self._next, digest, to_json(fingerprint), tenant, page_bytes)
            self._write({**self._by_digest, digest: new}, self._next + 1)
            self._by_digest[digest] = new
            self._next += 1
            log.info(
                "namespace=%s owner=%d tenant=%r page_bytes=%d",
                *(digest.hex(), new.owner, tenant, page_bytes),
            )
            return new

    def forget(self, digest: bytes) -> bool:
        """Remove a namespace whose pages are gone; False when it was not known."""
        with self._lock:
            known = NamespaceId(digest)
            if known not in self._by_digest:
                return False
            left = {each: value for each, value in self._by_digest.items() if each != known}
            self._write(left, self._next)
            self._by_digest = left
            return True

    def skip_past(self, owners: Iterable[int]) -> None:
        """Never give out these numbers: pages carry them although no record says whose they are.

        POOL_OWNER is passed over: it is nobody's number.
        """
        with self._lock:
            highest = max((owner for owner in owners if owner != POOL_OWNER), default=0)
            self._next = max(self._next, highest + 1)
            assert self._next <= OWNER_MAX, "owner numbers are used up"

    def check(self) -> None:
        """Assert that numbers and digests are distinct and below the next number."""
        with self._lock:
            owners = [known.owner for known in self._by_digest.values()]
            assert len(set(owners)) == len(owners), "two namespaces share a number"
            assert all(0 < owner < self._next for owner in owners), "a number from the future"
            assert all(d == known.digest for d, known in self._by_digest.items()), "wrong digest"

    def _write(self, entries: dict[NamespaceId, Namespace], following: int) -> None:
        rows = []
        for known in entries.values():
            row = asdict(known)
            row["digest"] = known.digest.hex()
            row["fingerprint"] = json.loads(known.fingerprint)
            rows.append(row)
        write_json(
            self._path,
            {"format": FORMAT, "version": VERSION, "next_owner": following, "namespaces": rows},
        )

    def _load(self) -> None:
        try:
            if self._path.stat().st_size > _FILE_BYTES_MAX:
                raise ValueError(f"longer than {_FILE_BYTES_MAX} bytes")
            found: Any = json.loads(self._path.read_bytes())
            if not isinstance(found, dict) or found.get("format") != FORMAT:
                raise ValueError(f"expected an object of format {FORMAT}")
            if found.get("version") != VERSION:
                raise FormatVersionError(
                    f"read {self._path}: version {found.get('version')!r}, this TierKV reads "
                    f"{VERSION}; use the TierKV that wrote it or another cache folder"
                )
            for row in found["namespaces"]:
                known = _entry(row)
                self._by_digest[known.digest] = known
            self._next = int(found["next_owner"])
            if any(known.owner >= self._next for known in self._by_digest.values()):
                raise ValueError("a number is not below next_owner")
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"read {self._path}: {error}; restore the file, or remove it to start without "
                "names for the pages that are there"
            ) from error


def _entry(row: Any) -> Namespace:
    fingerprint = from_json(json.dumps(row["fingerprint"]))
    digest = namespace(fingerprint)
    if digest.hex() != row["digest"]:
        raise ValueError(f"digest {str(row['digest'])[:64]} does not follow from its fingerprint")
    owner, page_bytes, tenant = row["owner"], row["page_bytes"], row["tenant"]
    if type(owner) is not int or not 0 < owner <= OWNER_MAX or type(page_bytes) is not int:
        raise ValueError("owner and page_bytes must be positive numbers")
    return Namespace(owner, digest, to_json(fingerprint), str(tenant), page_bytes)
