"""Where tests of the transport put pages in the memory they register."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.storage.transport.base import PageRange


@dataclass(frozen=True, slots=True)
class Layout:
    """Slots one after another. The payload of slot n is at a fixed place in it."""

    total_bytes: int
    first_slot: int
    slot_bytes: int
    payload_offset: int
    page_bytes: int
    slot_count: int

    def payload(self, slot: int) -> PageRange:
        """Where the payload of `slot` lies."""
        assert 0 <= slot < self.slot_count
        start = self.first_slot + slot * self.slot_bytes + self.payload_offset
        return PageRange(start, self.page_bytes)
