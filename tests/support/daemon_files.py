"""The offline check of everything a daemon of a test left behind, once its process has ended."""

from __future__ import annotations

from pathlib import Path

from tierkv.daemon.layout import nvme_classes
from tierkv.storage.fsck import FsckReport, check_store


def check_files(folder: Path) -> dict[str, FsckReport]:
    """Assert that the nvme folders and arenas under a folder of small_config() are clean.

    Every payload is read. Returns the reports by the name of what was checked; raises
    DirectoryInUseError while a daemon has the files open. Changes nothing.
    """
    reports: dict[str, FsckReport] = {}
    for root in nvme_classes(folder / "cache").values():
        reports[root.name] = check_store(root)
    for arena in sorted((folder / "arenas").glob("*.arena")):
        reports[arena.name] = check_store(None, arena)
    for name, report in reports.items():
        assert report.clean, f"{name}: {report.problems[:5]} of {len(report.problems)}"
    return reports
