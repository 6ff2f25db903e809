"""What is known of one key of the configuration: how it is written, its default, its meaning.

Owns no key: those are in tierkv/config/schema.py and remote_sections.py, which call this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierkv.config.kinds import Kind


@dataclass(frozen=True, slots=True)
class Key:
    """One key. `default` is text, as a user would write it; called when the machine decides."""

    kind: Kind
    default: str | Callable[[], str]
    help: str
    secret: bool = False
    share_of: str = ""
    """What 100% is: "space" for the file system of the section's directory, or another key."""

    @property
    def default_text(self) -> str:
        return self.default if isinstance(self.default, str) else self.default()
