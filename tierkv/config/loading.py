"""One call from file, environment and flags to settings, or to every mistake at once.

Owns the result that commands see: the settings, each value with its origin, and the mistakes.
Called by tierkv/cli.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.config import schema
from tierkv.config.fit import fit
from tierkv.config.kinds import show_size
from tierkv.config.machine import Machine, SystemMachine
from tierkv.config.schema import QUOTAS, SECTIONS, QuotaSection, Settings
from tierkv.config.sources import Layers, Mistake, read_layers
from tierkv.storage.errors import ConfigError

HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class InForce:
    """One key as it is in force, for people."""

    key: str
    value: str
    """As it could be written in a file; secrets are hidden."""
    source: str
    """"default", "tierkv.yaml:12", "environment TIERKV_NVME_SIZE" or "--nvme-size"."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a configuration amounts to."""

    mistakes: tuple[Mistake, ...]
    in_force: tuple[InForce, ...]
    _settings: Settings | None

    def settings(self) -> Settings:
        """The settings. Raises ConfigError that tells the first mistake and counts the others."""
        if not self.mistakes:
            assert self._settings is not None
            return self._settings
        others = len(self.mistakes) - 1
        more = f" (and {others} more mistakes; tierkv config check lists them)" if others else ""
        raise ConfigError(f"{self.mistakes[0]}{more}")


def load(
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, str] | None = None,
    machine: Machine | None = None,
) -> Loaded:
    """Read and check a configuration: defaults < file < environment < flags.

    `flags` maps dotted keys to text. Nothing is created or changed; nothing is raised.
    """
    layers = read_layers(file, environment, flags or {})
    fitted = fit(layers, machine or SystemMachine())
    mistakes = (*layers.mistakes, *fitted.mistakes)
    settings = None if mistakes else _settings(layers, fitted.values)
    return Loaded(mistakes, tuple(_in_force(layers, fitted.values)), settings)


def _settings(layers: Layers, values: Mapping[str, Any]) -> Settings:
    sections = {
        name: section(**{key: values[f"{name}.{key}"] for key in schema.section_keys(section)})
        for name, section in SECTIONS.items()
    }
    rules = tuple(_rule(index, values) for index in sorted(layers.rule_places))
    return Settings(**sections, quotas=rules)


def _rule(index: int, values: Mapping[str, Any]) -> QuotaSection:
    found = {}
    for name, key in schema.section_keys(QuotaSection).items():
        default = 0 if not key.kind.optional else None
        found[name] = values.get(f"{QUOTAS}.{index}.{name}", default)
    return QuotaSection(**found)


def _in_force(layers: Layers, values: Mapping[str, Any]) -> list[InForce]:
    shown = []
    for name, value in values.items():
        key = schema.find(name)
        assert key is not None
        hidden = key.secret and value is not None
        resolved = isinstance(value, int) and not isinstance(layers.values[name].parsed, int)
        text = HIDDEN if hidden else show_size(value) if resolved else key.kind.show(value)
        shown.append(InForce(name, text, layers.values[name].place))
    return shown
