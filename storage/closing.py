"""What is closed by close(), or by leaving its with block. No state.

Used by every floor for things that own connections, threads or processes. What is given back by
release() instead is storage.base.Held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Something that lets go of what it owns at the end of its with block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Let everything go. Idempotent."""
