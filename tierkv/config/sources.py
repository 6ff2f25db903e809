"""Where values come from: defaults, then the file, the environment, the flags.

Owns the order of the layers, the names of keys in each of them, and the record of which layer each
value in force came from. Does not judge whether values fit together or fit the machine: that is
tierkv/config/fit.py. A wrong value is recorded with its place and left out, so that one look finds
every mistake. Called by tierkv/config/loading.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierkv.config import schema
from tierkv.config.document import Document, Entry, Group, read_document
from tierkv.config.schema import QUOTAS, SECTIONS, QuotaSection

PREFIX = "TIERKV_"
DEFAULT = "default"
SHOWN_CHARS_MAX = 60
_CLOSE = 0.6
_VERY_CLOSE = 0.85


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that the user must change."""

    place: str
    """"tierkv.yaml:12", "environment TIERKV_NVME_SIZE" or "--nvme-size"."""
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


@dataclass(frozen=True, slots=True)
class Value:
    """One value in force, and where it came from."""

    parsed: Any
    """Shares of the machine are still schema.Size."""
    place: str


@dataclass(slots=True)
class Layers:
    """Every layer laid over the one before. `values` has every key of the schema."""

    values: dict[str, Value] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """Keys with a value that was left out: what follows from that is no mistake of its own."""
    rule_places: dict[int, str] = field(default_factory=dict)
    """Where each quota rule is, by its index as written."""

    def place_of(self, name: str) -> str:
        """Where a key's value came from; for a rule of quotas, where the rule stands."""
        head, _, rest = name.partition(".")
        if head == QUOTAS and name not in self.values:
            return self.rule_places[int(rest.partition(".")[0])]
        return self.values[name].place


def read_layers(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, str]
) -> Layers:
    """Read every layer. `flags` maps dotted keys to text. Nothing is raised for wrong values."""
    layers = Layers()
    for name, key in schema.all_keys():
        layers.values[name] = Value(key.kind.parse(key.default_text), DEFAULT)
    if file is not None:
        _add_file(layers, file)
    _add_environment(layers, environment)
    for name, text in flags.items():
        place = flag_of(name)
        if schema.find(name) is None:
            layers.mistakes.append(Mistake(place, _unknown(name)))
        else:
            _add(layers, name, Entry(text, 0), place)
    return layers


def variable_of(name: str) -> str:
    """The environment variable of a dotted key."""
    return PREFIX + name.replace(".", "_").upper()


def flag_of(name: str) -> str:
    """The flag of a dotted key; rules of quotas have none of their own and use --set."""
    if name.startswith(f"{QUOTAS}."):
        return f"--set {name}"
    return "--" + name.replace(".", "-").replace("_", "-")


# The file


def _add_file(layers: Layers, file: Path) -> None:
    document = read_document(file)
    found: list[tuple[int, Mistake]] = [
        (fault.line, Mistake(_line(file, fault.line), fault.text)) for fault in document.faults
    ]
    found += _shape_mistakes(file, document)
    before = len(layers.mistakes)
    for name, entry in document.entries.items():
        if schema.find(name) is not None:
            _add(layers, name, entry, _line(file, entry.line))
        elif not _is_empty_group(name, entry):
            found.append((entry.line, Mistake(_line(file, entry.line), _unknown_entry(name))))
    for name, group in document.groups.items():
        index = _rule_index(name)
        if index is not None:
            layers.rule_places[index] = _line(file, group.line)
    found += [(_line_number(mistake), mistake) for mistake in layers.mistakes[before:]]
    del layers.mistakes[before:]
    layers.mistakes += [mistake for _, mistake in sorted(found, key=lambda item: item[0])]


def _shape_mistakes(file: Path, document: Document) -> Iterator[tuple[int, Mistake]]:
    """Mappings and lists where something else belongs; what is below them is passed over."""
    for name, group in list(document.groups.items()):
        text = None if name not in document.groups else _group_mistake(name, group)
        if text is None:
            continue
        yield group.line, Mistake(_line(file, group.line), text)
        for table in (document.entries, document.groups):
            for below in [other for other in table if other.startswith(f"{name}.")]:
                table.pop(below)


def _group_mistake(name: str, group: Group) -> str | None:
    """What is wrong with a mapping or list at this key; None when it belongs there."""
    if name in SECTIONS:
        return f"{name}: expected keys below it, got a list" if group.is_list else None
    if name == QUOTAS:
        return None if group.is_list else f"{name}: expected a list of rules, got a mapping"
    if _rule_index(name) is not None:
        return f"{name}: expected a rule, got a list" if group.is_list else None
    if schema.find(name) is not None:
        return f"{name}: expected a value, got a {'list' if group.is_list else 'mapping'}"
    return _unknown(name) if "." in name else _unknown_section(name)


def _line(file: Path, line: int) -> str:
    return f"{file}:{line}" if line else str(file)


def _line_number(mistake: Mistake) -> int:
    return int(mistake.place.rpartition(":")[2])


def _is_empty_group(name: str, entry: Entry) -> bool:
    """A section with nothing below it, as when all its keys are commented out."""
    return entry.text == "" and (name in SECTIONS or name == QUOTAS)


def _rule_index(name: str) -> int | None:
    """N of quotas.N, when that is what the name is."""
    head, _, index = name.partition(".")
    return int(index) if head == QUOTAS and index.isdigit() else None


def _unknown_entry(name: str) -> str:
    if name in SECTIONS:
        return f"{name}: expected keys below it, got a value"
    if name == QUOTAS:
        return f"{name}: expected a list of rules, each with tenant or namespace"
    return _unknown(name) if "." in name else _unknown_section(name)


# The environment


def _add_environment(layers: Layers, environment: Mapping[str, str]) -> None:
    known = {variable_of(name): name for name, _ in schema.all_keys()}
    for variable in sorted(environment):
        if not variable.startswith(PREFIX):
            continue
        place = f"environment {variable}"
        name = known.get(variable) or _rule_variable(variable)
        if name is not None:
            _add(layers, name, Entry(environment[variable], 0), place)
            continue
        section = variable.removeprefix(PREFIX).partition("_")[0].lower()
        ours = section in SECTIONS or section == QUOTAS
        close = difflib.get_close_matches(variable, known, 1, _CLOSE if ours else _VERY_CLOSE)
        if ours or close:
            hint = f"did you mean {close[0]}?" if close else "see tierkv config show"
            layers.mistakes.append(Mistake(place, f"unknown variable; {hint}"))


def _rule_variable(variable: str) -> str | None:
    """quotas.N.KEY of TIERKV_QUOTAS_N_KEY."""
    parts = variable.removeprefix(PREFIX).lower().split("_", 2)
    name = ".".join(parts)
    return name if parts[0] == QUOTAS and schema.find(name) is not None else None


# One value


def _add(layers: Layers, name: str, entry: Entry, place: str) -> None:
    key = schema.find(name)
    assert key is not None
    layers.broken.add(name)
    index = name.split(".")[1] if name.startswith(f"{QUOTAS}.") else None
    if index is not None:
        layers.rule_places.setdefault(int(index), place)
    if entry.is_list and not key.kind.is_list:
        layers.mistakes.append(Mistake(place, f"{name}: expected one value, got a list"))
        return
    if entry.text == "" and not key.kind.optional:
        layers.mistakes.append(
            Mistake(place, f"{name}: has no value; leave the key out for {key.default_text}")
        )
        return
    try:
        parsed = key.kind.parse(entry.text)
    except ValueError as error:
        # A secret that does not parse must not end up in a log.
        text = "expected printable text" if key.secret else str(error)
        layers.mistakes.append(Mistake(place, f"{name}: {text}"))
        return
    layers.broken.discard(name)
    layers.values[name] = Value(parsed, place)


def _unknown(name: str) -> str:
    head, _, last = name.rpartition(".")
    candidates = [known for known, _ in schema.all_keys()]
    if head.partition(".")[0] == QUOTAS:
        candidates = [f"{head}.{known}" for known in schema.section_keys(QuotaSection)]
    inside = [known for known in candidates if known.startswith(f"{head}.")]
    close = difflib.get_close_matches(
        last, [known.rpartition(".")[2] for known in inside], 1, _CLOSE
    )
    if close:
        return f"{name}: unknown key; did you mean {head}.{close[0]}?"
    near = difflib.get_close_matches(name, candidates, 1, _CLOSE)
    elsewhere = [known for known in candidates if known.rpartition(".")[2] == last]
    for guess in (*elsewhere, *near):
        return f"{name}: unknown key; did you mean {guess}?"
    known_here = ", ".join(known.rpartition(".")[2] for known in inside)
    return f"{name}: unknown key; {head} has {known_here}" if inside else f"{name}: unknown key"


def _unknown_section(name: str) -> str:
    names = [*SECTIONS, QUOTAS]
    for guess in difflib.get_close_matches(name, names, 1, _CLOSE):
        return f"{name}: unknown section; did you mean {guess}?"
    return f"{name}: unknown section; expected one of {', '.join(names)}"
