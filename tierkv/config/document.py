"""A YAML file as dotted keys, each with the text of its value and its line.

Owns reading the file: size, encoding, syntax, duplicate keys. Knows no key. YAML gives structure
only: a scalar stays the text that stands in the file, so that `0600` and `20GiB` mean the same in
a file, a variable and a flag. Nothing is constructed from tags. Called by tierkv/config/sources.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import yaml

FILE_BYTES_MAX = 256 << 10
DEPTH_MAX = 3
"""Levels of mappings and lists below the top: section, rule of a list, key."""
_NULL = "tag:yaml.org,2002:null"
_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("null", "bool", "int", "float", "str", "timestamp", "merge", "value")
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One value as the file has it."""

    text: str
    line: int
    """From 1: where its key stands."""
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """A key that holds others."""

    line: int
    is_list: bool
    """A list of mappings, or of anything but plain values."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a file, and where. Line 0: the whole file."""

    line: int
    text: str


@dataclass(slots=True)
class Document:
    """What a file says. Entries are complete up to the faults."""

    entries: dict[str, Entry] = field(default_factory=dict)
    """By dotted key; the rules of a list are numbered from 0: quotas.0.ttl."""
    groups: dict[str, Group] = field(default_factory=dict)
    """By dotted key."""
    faults: list[Fault] = field(default_factory=list)


def read_document(path: Path) -> Document:
    """Read one file. What is wrong with it is in the faults; nothing is raised."""
    document = Document()
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        document.faults.append(Fault(0, f"cannot read it: {error.strerror}; check the path"))
        return document
    if len(data) > FILE_BYTES_MAX:
        document.faults.append(Fault(0, f"expected at most {FILE_BYTES_MAX} bytes, got more"))
        return document
    _parse(data, document)
    return document


def _parse(data: bytes, document: Document) -> None:
    try:
        text = data.decode()
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        document.faults.append(Fault(line, "not UTF-8; convert the file"))
        return
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        document.faults.append(Fault(line, f"not YAML: character {chr(error.character)!r}"))
        return
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join((error.problem or error.context or "cannot be parsed").split())
        document.faults.append(Fault(mark.line + 1 if mark else 0, f"not YAML: {problem}"))
        return
    except RecursionError:
        document.faults.append(Fault(0, "not YAML that can be read: nested too deeply"))
        return
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == _NULL):
        return
    if not isinstance(root, yaml.MappingNode):
        line = root.start_mark.line + 1
        document.faults.append(Fault(line, f"expected sections such as host:, got {_kind(root)}"))
        return
    _walk_mapping(root, "", 0, document)


def _walk_mapping(node: yaml.MappingNode, prefix: str, depth: int, document: Document) -> None:
    seen: dict[str, int] = {}
    for name_node, value in node.value:
        line = name_node.start_mark.line + 1
        if not isinstance(name_node, yaml.ScalarNode):
            document.faults.append(Fault(line, f"expected a key, got {_kind(name_node)}"))
            continue
        name = prefix + name_node.value
        if "." in name_node.value:
            document.faults.append(
                Fault(line, f"{name}: unknown key; write a section and its keys below it")
            )
            continue
        if name in seen:
            document.faults.append(
                Fault(line, f"{name}: given twice, first in line {seen[name]}; keep one")
            )
            continue
        seen[name] = line
        _walk_value(name, value, line, depth, document)


def _walk_value(name: str, node: yaml.Node, line: int, depth: int, document: Document) -> None:
    if isinstance(node, yaml.ScalarNode):
        if node.tag not in _PLAIN_TAGS:
            document.faults.append(Fault(line, f"{name}: expected a plain value, got {node.tag}"))
            return
        is_null = node.tag == _NULL
        document.entries[name] = Entry("" if is_null else node.value, line)
        return
    if depth >= DEPTH_MAX:
        document.faults.append(Fault(line, f"{name}: expected a value, got {_kind(node)}"))
    elif isinstance(node, yaml.MappingNode):
        document.groups[name] = Group(line, is_list=False)
        _walk_mapping(node, f"{name}.", depth + 1, document)
    elif isinstance(node, yaml.SequenceNode):
        _walk_sequence(name, node, line, depth, document)


def _walk_sequence(
    name: str, node: yaml.SequenceNode, line: int, depth: int, document: Document
) -> None:
    """A list of values is one entry, joined by commas; a list of mappings is a group."""
    if all(isinstance(item, yaml.ScalarNode) for item in node.value):
        text = ",".join(item.value for item in node.value)
        document.entries[name] = Entry(text, line, is_list=True)
        return
    document.groups[name] = Group(line, is_list=True)
    for index, item in enumerate(node.value):
        _walk_value(f"{name}.{index}", item, item.start_mark.line + 1, depth + 1, document)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else f"{node.value!r}"
