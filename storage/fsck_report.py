"""What a check of cache files found: findings, totals, progress. Values only.

Owns no state and does no I/O but through the caller's progress callback. Filled by
storage/fsck_nvme.py and storage/fsck_arena.py, handed out by storage/fsck.py. Invariant: a report
lists at most FINDINGS_MAX findings and counts the others, so that a ruined disk cannot fill memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

FINDINGS_MAX = 10_000
_STEP_SLOTS = 256


class FindingKind(StrEnum):
    """What is wrong, by its stable name."""

    MANIFEST = "manifest"
    """A control file is missing, damaged or contradicts its folder."""
    LEFTOVER_FILE = "leftover_file"
    """What an interrupted write or rebuild left behind."""
    SEGMENT = "segment"
    """A slot file is missing, cut short or longer than it may be."""
    INDEX = "index"
    """The index is missing, truncated or unreadable."""
    ACCOUNTING = "accounting"
    """The index counts other entries than it has."""
    ENTRY_PLACE = "entry_place"
    """An index entry names a slot that no file has."""
    ENTRY_SIZE = "entry_size"
    """An index entry promises another payload size than its folder's."""
    SLOT_SHARED = "slot_shared"
    """Two keys name one slot."""
    KEY_TWICE = "key_twice"
    """Two slots hold one key."""
    HEADER = "header"
    """A slot's header is damaged or describes another page than was promised."""
    OWNER = "owner"
    """Header and index name different owners."""
    PAYLOAD = "payload"
    """A payload does not have the checksum it was written with."""
    UNREADABLE = "unreadable"
    """The device returned an error."""
    RECENCY = "recency"
    """The order of use is damaged in part: costs eviction order, never a page."""
    ARENA = "arena"
    """The arena's header block is damaged or its file is cut short."""
    UNVERIFIABLE = "unverifiable"
    """Pages without a checksum; a note."""
    UNUSED_PAGES = "unused_pages"
    """Pages in slots that no index entry names, as eviction leaves them; a note."""


NOTES = frozenset({FindingKind.UNVERIFIABLE, FindingKind.UNUSED_PAGES})
"""Kinds that are normal and need no repair."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be, or a note."""

    kind: FindingKind
    place: str
    """File or folder, with the slot where there is one."""
    line: str
    """What was expected and found, in one line."""
    repaired: bool = False

    @property
    def note(self) -> bool:
        """True when it is normal: nothing is wrong."""
        return self.kind in NOTES


@dataclass(frozen=True, slots=True)
class FsckProgress:
    """How far a check has come."""

    stage: str
    done: int
    total: int
    """Slots of this stage."""
    read_bytes: int
    elapsed_s: float


ProgressCallback = Callable[[FsckProgress], None]


@dataclass(frozen=True, slots=True)
class FsckReport:
    """Everything one check found."""

    findings: tuple[Finding, ...]
    unlisted: int
    """Findings past FINDINGS_MAX: counted, and repaired when asked, but not listed."""
    slots: int
    """Slots looked at."""
    pages: int
    """Pages that are intact now."""
    read_bytes: int
    elapsed_s: float

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Findings without the notes."""
        return tuple(finding for finding in self.findings if not finding.note)

    @property
    def clean(self) -> bool:
        """True when nothing is wrong that was not repaired."""
        return not self.unlisted and all(finding.repaired for finding in self.problems)


@dataclass(slots=True)
class FsckWork:
    """A check under way: its orders and what it has found so far."""

    repair: bool
    verify_payloads: bool
    progress: ProgressCallback | None = None
    findings: list[Finding] = field(default_factory=list)
    unlisted: int = 0
    slots: int = 0
    pages: int = 0
    read_bytes: int = 0
    started_s: float = field(default_factory=time.monotonic)

    def find(self, kind: FindingKind, place: object, line: str, repaired: bool = False) -> None:
        """Note one finding."""
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(kind, str(place), line, repaired))
        elif not repaired:
            self.unlisted += 1

    def step(self, stage: str, done: int, total: int) -> None:
        """Report progress now and then: every few hundred slots and at the end."""
        if self.progress is not None and (done == total or done % _STEP_SLOTS == 0):
            elapsed_s = time.monotonic() - self.started_s
            self.progress(FsckProgress(stage, done, total, self.read_bytes, elapsed_s))

    def report(self) -> FsckReport:
        """What was found."""
        return FsckReport(
            findings=tuple(self.findings),
            unlisted=self.unlisted,
            slots=self.slots,
            pages=self.pages,
            read_bytes=self.read_bytes,
            elapsed_s=time.monotonic() - self.started_s,
        )
