"""House rules that no linter knows: sizes, names, docstrings and words that do not belong here.

Prints one line per finding and exits 1 when there is any. Reads files as text, runs none.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
LEFT_FOR_LATER = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|farm|root|home/\w+)/")
TEST_SLEEP = re.compile(r"\bsleep\(")


def main() -> int:
    """Check every tracked file; return the exit status."""
    findings = [finding for path in tracked() for finding in check(path)]
    for finding in findings:
        print(finding)
    print(f"tidy: {len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0


def tracked() -> list[Path]:
    """Files of the checkout, links left out (they serve type checkers only)."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    paths = (ROOT / name for name in listed.split("\0") if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def check(path: Path) -> Iterator[str]:
    """Yield one line for each finding in one file."""
    name = path.relative_to(ROOT)
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return
    this_file = path == Path(__file__).resolve()
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATH.search(line) and not this_file:
            yield f"{name}:{number}: a path of one machine"
    if path.suffix != ".py":
        return
    if path.stem in BANNED_NAMES:
        yield f"{name}: the name says nothing of what is inside"
    lines = text.count("\n")
    if lines > MODULE_LINES_MAX:
        yield f"{name}: {lines} lines, at most {MODULE_LINES_MAX}"
    for number, line in enumerate(text.splitlines(), 1):
        if LEFT_FOR_LATER.search(line) and not this_file:
            yield f"{name}:{number}: left for later"
        if name.parts[0] == "tests" and TEST_SLEEP.search(line):
            yield f"{name}:{number}: a sleep in a test; wait for an event instead"
    yield from check_tree(name, ast.parse(text))


def check_tree(name: Path, tree: ast.Module) -> Iterator[str]:
    """Docstrings and function sizes."""
    if tree.body and name.parts[0] != "tests" and not ast.get_docstring(tree):
        yield f"{name}: no module docstring"
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        size = (node.end_lineno or node.lineno) - node.lineno + 1
        if size > FUNCTION_LINES_MAX:
            yield f"{name}:{node.lineno}: {node.name} has {size} lines, at most 70"


if __name__ == "__main__":
    sys.exit(main())
