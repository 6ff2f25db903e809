"""What makes KV reusable: fingerprint, namespace and the chain of page keys.

Owns the canonical encoding of docs/formats/identity.md, byte for byte, and nothing else: no I/O,
no state, no models. Fingerprints are built by engine/serve/fingerprint.py; keys are asked for by
the engine's prefix cache, and stored as opaque bytes by the tiers.

Invariants: no two different fingerprints have the same encoding; the same tokens under the same
fingerprint have the same keys in every process, on every machine, for ever. Whatever would change
a digest raises FORMAT_VERSION.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from itertools import pairwise
from typing import Any, get_origin, get_type_hints

from tierkv.storage.errors import ConfigError, FormatVersionError
from tierkv.storage.types import (
    KEY_BYTES,
    TOKEN_BYTES,
    NamespaceId,
    PackedTokens,
    PageKey,
)

FORMAT_VERSION = 1
"""Of the encodings and of the page payload: raising it orphans every stored page."""

NAMESPACE_DOMAIN = b"tierkv.namespace"
PAGE_DOMAIN = b"tierkv.page_keys"
NO_DIGEST = b""
"""In place of a digest: there is no such thing (no LoRA adapter)."""

_BYTES, _TEXT, _INTEGER, _MAPPING = 1, 2, 3, 4
_TEXT_BYTES_MAX = 1 << 16
_FIELDS_MAX = 1 << 10

ArchitectureFields = tuple[tuple[str, str | int], ...]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that must be equal for the KV of one worker to be valid in another.

    Raises ValueError on construction when a value has the wrong type or is out of range.
    """

    weights_digest: bytes
    """32 bytes over the tensors, not over a name or path."""
    architecture: ArchitectureFields
    """What shapes the KV, as (name, value) sorted by name: see architecture_fields()."""
    kv_dtype: str
    kv_quantisation: str
    """"none", or the name of the scheme."""
    page_tokens: int
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    pipeline_parallel_size: int = 1
    pipeline_parallel_rank: int = 0
    context_parallel_size: int = 1
    context_parallel_rank: int = 0
    lora_digest: bytes = NO_DIGEST
    """32 bytes over the adapter's tensors, or NO_DIGEST."""
    tenant: str = ""
    cache_salt: str = ""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if type(value) is not kind:
                raise ValueError(
                    f"fingerprint: expected {name} to be {kind.__name__}, got {value!r}"
                )
        if len(self.weights_digest) != KEY_BYTES:
            raise ValueError(f"fingerprint: expected weights_digest of {KEY_BYTES} bytes")
        if len(self.lora_digest) not in (0, KEY_BYTES):
            raise ValueError(f"fingerprint: expected lora_digest of 0 or {KEY_BYTES} bytes")
        if self.page_tokens < 1 or self.format_version < 1:
            raise ValueError("fingerprint: expected page_tokens and format_version from 1 up")
        for axis in ("tensor", "pipeline", "context"):
            size = getattr(self, f"{axis}_parallel_size")
            rank = getattr(self, f"{axis}_parallel_rank")
            if not 0 <= rank < size:
                raise ValueError(
                    f"fingerprint: expected 0 <= {axis} rank < size, got {rank}/{size}"
                )
        _check_architecture(self.architecture)
        # Encoding rejects what has no encoding: integers over 64 bits, long or broken text.
        encode(self)


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field in which two fingerprints differ. None: that side has no such field."""

    field: str
    """Name; parts of the architecture are "architecture.<name>"."""
    left: str | None
    right: str | None

    def __str__(self) -> str:
        return f"{self.field}: {self.left or 'none'} / {self.right or 'none'}"


def architecture_fields(values: Mapping[str, str | int]) -> ArchitectureFields:
    """`values` in the order that Fingerprint.architecture asks for: by name, as UTF-8 bytes."""
    return tuple(sorted(values.items(), key=lambda item: item[0].encode()))


def encode(fingerprint: Fingerprint) -> bytes:
    """The canonical encoding, docs/formats/identity.md. Raises ValueError when there is none."""
    parts = [NAMESPACE_DOMAIN]
    for name in ENCODED_FIELDS:
        parts += (_encode_value(name), _encode_value(getattr(fingerprint, name)))
    return b"".join(parts)


def namespace(fingerprint: Fingerprint) -> NamespaceId:
    """The 32-byte digest that every page key of this fingerprint descends from."""
    return NamespaceId(sha256(encode(fingerprint)).digest())


def page_keys(root: NamespaceId | PageKey, tokens: PackedTokens, page_tokens: int) -> list[PageKey]:
    """Keys of the full pages of `tokens`, in order; a partial last page has none.

    `root` is the namespace for a sequence's start, or the key of the page just before `tokens`:
    a request extends its chain as it generates. Raises ValueError when the root is not 32 bytes,
    the tokens are no whole number, or page_tokens is not positive. O(tokens), 0.6 us a page of 16.
    """
    if len(root) != KEY_BYTES:
        raise ValueError(f"page keys: expected a root of {KEY_BYTES} bytes, got {len(root)}")
    if page_tokens < 1 or len(tokens) % TOKEN_BYTES:
        raise ValueError(
            f"page keys: expected page_tokens from 1 up and whole tokens, got {page_tokens} and "
            f"{len(tokens)} bytes"
        )
    step = page_tokens * TOKEN_BYTES
    keys: list[PageKey] = []
    parent: bytes = root
    for start in range(0, len(tokens) - step + 1, step):
        parent = sha256(PAGE_DOMAIN + parent + tokens[start : start + step]).digest()
        keys.append(PageKey(parent))
    return keys


def explain(left: Fingerprint, right: Fingerprint) -> list[FieldDifference]:
    """Every field in which the two differ, in the order of the encoding. Empty: same namespace."""
    differences: list[FieldDifference] = []
    for name in ENCODED_FIELDS:
        ours, theirs = getattr(left, name), getattr(right, name)
        if ours == theirs:
            continue
        if name == "architecture":
            differences += _explain_architecture(dict(ours), dict(theirs))
        else:
            differences.append(FieldDifference(name, _shown(ours), _shown(theirs)))
    return differences


def to_json(fingerprint: Fingerprint) -> str:
    """One JSON object, digests in hex: what is stored beside the pages for explain()."""
    values = {name: getattr(fingerprint, name) for name in ENCODED_FIELDS}
    values["architecture"] = dict(fingerprint.architecture)
    for name in _DIGESTS:
        values[name] = values[name].hex()
    return json.dumps(values, indent=2)


def from_json(text: str | bytes) -> Fingerprint:
    """Inverse of to_json(), for input that may be damaged.

    Raises FormatVersionError for another format version, ConfigError for anything else that is
    not a fingerprint: unknown, missing or malformed fields.
    """
    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"read fingerprint: not JSON ({error}); remove the cache") from error
    if not isinstance(values, dict):
        raise ConfigError("read fingerprint: expected a JSON object; remove the cache")
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"read fingerprint: expected format version {FORMAT_VERSION}, got {version!r}; "
            "use another cache folder or the TierKV version that wrote it"
        )
    if values.keys() != set(ENCODED_FIELDS):
        odd = sorted(values.keys() ^ set(ENCODED_FIELDS))
        raise ConfigError(f"read fingerprint: missing or unknown fields {odd}; remove the cache")
    try:
        for name in _DIGESTS:
            values[name] = bytes.fromhex(values[name])
        values["architecture"] = architecture_fields(values["architecture"])
        return Fingerprint(**values)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"read fingerprint: {error}; remove the cache") from error


ENCODED_FIELDS = (
    "format_version",
    *(field.name for field in fields(Fingerprint) if field.name != "format_version"),
)
"""Order of the encoding and of explain(): the version first, then as declared."""

_DIGESTS = ("weights_digest", "lora_digest")
_KINDS: dict[str, type] = {
    name: get_origin(hint) or hint for name, hint in get_type_hints(Fingerprint).items()
}


def _check_architecture(entries: ArchitectureFields) -> None:
    names = []
    for entry in entries:
        if type(entry) is not tuple or len(entry) != 2:
            raise ValueError(f"fingerprint: expected (name, value) in architecture, got {entry!r}")
        name, value = entry
        if type(name) is not str or type(value) not in (str, int):
            raise ValueError(
                f"fingerprint: expected text or integer in architecture, got {entry!r}"
            )
        names.append(name.encode())
    if any(first >= second for first, second in pairwise(names)):
        raise ValueError("fingerprint: expected architecture sorted by name, each name once")


def _encode_value(value: Any) -> bytes:
    """Type byte, length as little-endian u32, content."""
    if isinstance(value, bytes):
        kind, content = _BYTES, value
    elif isinstance(value, str):
        kind, content = _TEXT, value.encode()
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"fingerprint: expected integers of 64 bits, got {value}")
        kind, content = _INTEGER, struct.pack("<q", value)
    else:
        if len(value) > _FIELDS_MAX:
            raise ValueError(f"fingerprint: more than {_FIELDS_MAX} architecture fields")
        kind = _MAPPING
        content = b"".join(_encode_value(item) for entry in value for item in entry)
    if kind != _MAPPING and len(content) > _TEXT_BYTES_MAX:
        raise ValueError(f"fingerprint: a value is longer than {_TEXT_BYTES_MAX} bytes")
    return struct.pack("<BI", kind, len(content)) + content


def _explain_architecture(
    left: Mapping[str, str | int], right: Mapping[str, str | int]
) -> list[FieldDifference]:
    return [
        FieldDifference(
            f"architecture.{name}",
            _shown(left[name]) if name in left else None,
            _shown(right[name]) if name in right else None,
        )
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    ]


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
