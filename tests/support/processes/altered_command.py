"""The command `tierkv` as it is on another machine: packages missing, another format of messages.

python -m tests.support.processes.altered_command '{"lacking": [...], "version": N}' ARGUMENTS
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Without:
    """A finder of modules that does not find some packages."""

    def __init__(self, finder: Any, names: Sequence[str]) -> None:
        self._finder = finder
        self._names = tuple(names)

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(self._names):
            return None
        found: importlib.machinery.ModuleSpec | None = self._finder.find_spec(name, path, target)
        return found


def main() -> int:
    """Be that machine, then run the command."""
    how = json.loads(sys.argv[1])
    if lacking := how.get("lacking"):
        sys.meta_path[:] = [_Without(finder, lacking) for finder in sys.meta_path]
    if "version" in how:
        from tierkv.storage.pool import envelope

        envelope.VERSION = how["version"]

    from tierkv.cli.main import main as command

    return command(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
