"""Fingerprint, namespace and page keys against docs/formats/identity.md."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.storage.errors import ConfigError, FormatVersionError
from tierkv.storage.identity import (
    ENCODED_FIELDS,
    FORMAT_VERSION,
    FieldDifference,
    Fingerprint,
    architecture_fields,
    encode,
    explain,
    from_json,
    namespace,
    page_keys,
    to_json,
)
from tierkv.storage.types import NamespaceId, PackedTokens, pack_tokens

EXAMPLE = Fingerprint(
    weights_digest=bytes(range(32)),
    architecture=architecture_fields({"layers": 2, "architecture": "llama"}),
    kv_dtype="float32",
    kv_quantisation="none",
    page_tokens=16,
)

GOLDEN_NAMESPACE = "6c182ab334237cb7c25a7233585c4597793ac251bdde9fbb43590cbc2941d355"
GOLDEN_KEYS = [
    "0bbc44d21c53b1b6cd54985332fd2fdc6436160036ec934e15d6c3918031f6cd",
    "17bdf259fc86f4009a5fbab590d132fe120e9893e2fda54c28fb31513cfb2885",
]


def _value(kind: int, content: bytes) -> bytes:
    """A value as the document describes it, written without looking at the code."""
    return bytes([kind]) + len(content).to_bytes(4, "little") + content


def _text(value: str) -> bytes:
    return _value(2, value.encode("utf-8"))


def _integer(value: int) -> bytes:
    return _value(3, value.to_bytes(8, "little", signed=True))


def _encoding_by_the_document() -> bytes:
    architecture = _text("architecture") + _text("llama") + _text("layers") + _integer(2)
    encoding = b"tierkv.namespace"
    encoding += _text("format_version") + _integer(1)
    encoding += _text("weights_digest") + _value(1, bytes(range(32)))
    encoding += _text("architecture") + _value(4, architecture)
    encoding += _text("kv_dtype") + _text("float32")
    encoding += _text("kv_quantisation") + _text("none")
    encoding += _text("page_tokens") + _integer(16)
    for axis in ("tensor", "pipeline", "context"):
        encoding += _text(f"{axis}_parallel_size") + _integer(1)
        encoding += _text(f"{axis}_parallel_rank") + _integer(0)
    encoding += _text("lora_digest") + _value(1, b"")
    return encoding + _text("tenant") + _text("") + _text("cache_salt") + _text("")


def test_w5_golden_vectors() -> None:
    root = namespace(EXAMPLE)
    assert root.hex() == GOLDEN_NAMESPACE
    assert [key.hex() for key in page_keys(root, pack_tokens(range(32)), 16)] == GOLDEN_KEYS


def test_w5_document_gives_the_same_digests() -> None:
    encoding = _encoding_by_the_document()
    assert encode(EXAMPLE) == encoding
    parent = hashlib.sha256(encoding).digest()
    assert parent.hex() == GOLDEN_NAMESPACE
    for page, golden in enumerate(GOLDEN_KEYS):
        tokens = struct.pack("<16I", *range(page * 16, page * 16 + 16))
        parent = hashlib.sha256(b"tierkv.page_keys" + parent + tokens).digest()
        assert parent.hex() == golden


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_w5_other_process_same_keys(seed: str) -> None:
    code = (
        "from tierkv.storage.identity import page_keys;"
        "print(page_keys(bytes(32), bytes(64), 16)[0].hex())"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
    ).stdout
    here = page_keys(NamespaceId(bytes(32)), PackedTokens(bytes(64)), 16)[0]
    assert output.strip() == here.hex()


OTHERS = {
    "weights_digest": bytes(32),
    "architecture": architecture_fields({"architecture": "llama", "layers": 3}),
    "kv_dtype": "bfloat16",
    "kv_quantisation": "fp8_per_head",
    "page_tokens": 32,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "context_parallel_size": 2,
    "lora_digest": bytes(range(1, 33)),
    "tenant": "acme",
    "cache_salt": "pepper",
    "format_version": 2,
}


@pytest.mark.parametrize("field", OTHERS)
def test_w3_each_field_makes_another_namespace(field: str) -> None:
    other = dataclasses.replace(EXAMPLE, **{field: OTHERS[field]})
    assert namespace(other) != namespace(EXAMPLE)
    assert len(explain(EXAMPLE, other)) == 1


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
def test_w3_each_rank_has_its_namespace(axis: str) -> None:
    ranks = [
        dataclasses.replace(EXAMPLE, **{f"{axis}_parallel_size": 4, f"{axis}_parallel_rank": rank})
        for rank in range(4)
    ]
    assert len({namespace(rank) for rank in ranks}) == 4


def test_w3_tenant_and_salt_are_not_interchangeable() -> None:
    tenant = dataclasses.replace(EXAMPLE, tenant="x")
    salt = dataclasses.replace(EXAMPLE, cache_salt="x")
    assert namespace(tenant) != namespace(salt)


def test_w4_changed_weights_are_another_namespace_and_explained() -> None:
    other = dataclasses.replace(EXAMPLE, weights_digest=bytes(32))
    assert namespace(other) != namespace(EXAMPLE)
    difference = FieldDifference("weights_digest", bytes(range(32)).hex(), "00" * 32)
    assert explain(EXAMPLE, other) == [difference]


def test_w3_explain_names_architecture_fields_on_either_side() -> None:
    left = dataclasses.replace(
        EXAMPLE, architecture=architecture_fields({"layers": 2, "rope_theta": "10000.0"})
    )
    right = dataclasses.replace(
        EXAMPLE, architecture=architecture_fields({"layers": 3, "sliding_window": 0}), tenant="t"
    )
    assert explain(left, right) == [
        FieldDifference("architecture.layers", "2", "3"),
        FieldDifference("architecture.rope_theta", "10000.0", None),
        FieldDifference("architecture.sliding_window", None, "0"),
        FieldDifference("tenant", "", "t"),
    ]
    assert str(explain(left, right)[1]) == "architecture.rope_theta: 10000.0 / none"
    assert explain(left, left) == []


def test_integer_and_text_of_the_same_spelling_differ() -> None:
    number = dataclasses.replace(EXAMPLE, architecture=(("layers", 2),))
    text = dataclasses.replace(EXAMPLE, architecture=(("layers", "2"),))
    assert namespace(number) != namespace(text)
    assert explain(number, text) == [FieldDifference("architecture.layers", "2", "2")]


short_text = st.text(max_size=4)
architectures = st.dictionaries(
    short_text, short_text | st.integers(-(2**63), 2**63 - 1), max_size=4
).map(architecture_fields)
digests = st.sampled_from([bytes(32), bytes(range(32))])
fingerprints = st.builds(
    Fingerprint,
    weights_digest=digests,
    architecture=architectures,
    kv_dtype=short_text,
    kv_quantisation=short_text,
    page_tokens=st.integers(1, 64),
    lora_digest=digests | st.just(b""),
    tenant=short_text,
    cache_salt=short_text,
)


@given(fingerprints, fingerprints)
def test_w3_different_fingerprints_never_encode_equally(
    left: Fingerprint, right: Fingerprint
) -> None:
    assert (encode(left) == encode(right)) == (left == right)
    assert (explain(left, right) == []) == (left == right)


@given(st.text(max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_w3_moving_a_field_boundary_changes_the_encoding(
    text: str, first: int, second: int
) -> None:
    """The same characters cut differently between tenant and salt are different tenants."""
    cuts = {
        (text[:cut], text[cut:]): encode(
            dataclasses.replace(EXAMPLE, tenant=text[:cut], cache_salt=text[cut:])
        )
        for cut in (first, second)
    }
    assert len(set(cuts.values())) == len(cuts)


@given(fingerprints)
def test_json_round_trip(fingerprint: Fingerprint) -> None:
    again = from_json(to_json(fingerprint))
    assert again == fingerprint
    assert hash(again) == hash(fingerprint)
    assert namespace(again) == namespace(fingerprint)


def test_fingerprint_can_be_pickled_to_worker_processes() -> None:
    assert pickle.loads(pickle.dumps(EXAMPLE)) == EXAMPLE


def test_json_of_another_version_is_refused_as_such() -> None:
    text = to_json(dataclasses.replace(EXAMPLE, format_version=FORMAT_VERSION + 1))
    with pytest.raises(FormatVersionError, match="expected format version 1, got 2"):
        from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": 7},
        {"page_tokens": "16"},
        {"page_tokens": True},
        {"page_tokens": 0},
        {"weights_digest": "zz"},
        {"weights_digest": "00"},
        {"weights_digest": None},
        {"lora_digest": "00"},
        {"architecture": [1]},
        {"architecture": {"layers": 1.5}},
        {"architecture": {"layers": None}},
        {"tensor_parallel_rank": 1},
        {"format_version": True},
        {"page_tokens": 2**63},
        {"tenant": "x" * 70000},
        {"surprise": 1},
    ],
    ids=str,
)
def test_damaged_json_is_a_config_error(change: dict[str, object]) -> None:
    values = json.loads(to_json(EXAMPLE)) | change
    with pytest.raises(ConfigError, match=r"^read fingerprint: "):
        from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100000, b"\xff\xfe\xfa"])
def test_text_that_is_no_fingerprint_is_a_config_error(text: str | bytes) -> None:
    with pytest.raises(ConfigError, match=r"^read fingerprint: "):
        from_json(text)


def test_missing_field_is_named() -> None:
    values = json.loads(to_json(EXAMPLE))
    del values["cache_salt"]
    with pytest.raises(ConfigError, match="cache_salt"):
        from_json(json.dumps(values))


def test_unsorted_or_repeated_architecture_is_refused() -> None:
    for entries in ((("b", 1), ("a", 1)), (("a", 1), ("a", 2)), (("a", True),), (("a",),)):
        with pytest.raises(ValueError, match="architecture"):
            dataclasses.replace(EXAMPLE, architecture=entries)


def test_every_field_is_encoded() -> None:
    assert set(ENCODED_FIELDS) == {field.name for field in dataclasses.fields(Fingerprint)}
    assert ENCODED_FIELDS[0] == "format_version"


@pytest.mark.parametrize("page_tokens", [1, 3, 16, 64])
def test_chain_continues_from_any_key(page_tokens: int) -> None:
    ids = [index * 7919 % 50000 for index in range(5 * page_tokens + page_tokens // 2)]
    root = namespace(EXAMPLE)
    keys = page_keys(root, pack_tokens(ids), page_tokens)
    assert len(keys) == len(ids) // page_tokens
    for done in range(1, 6):
        rest = pack_tokens(ids[done * page_tokens :])
        assert page_keys(keys[done - 1], rest, page_tokens) == keys[done:]


def test_a_key_depends_on_all_tokens_before_it() -> None:
    root = namespace(EXAMPLE)
    keys = page_keys(root, pack_tokens(range(64)), 16)
    other = page_keys(root, pack_tokens([1, *range(1, 64)]), 16)
    assert not set(keys) & set(other)
    later = page_keys(root, pack_tokens([*range(48), 1, *range(49, 64)]), 16)
    assert later[:3] == keys[:3]
    assert later[3] != keys[3]


def test_partial_last_page_has_no_key() -> None:
    root = namespace(EXAMPLE)
    assert page_keys(root, pack_tokens(range(15)), 16) == []
    assert page_keys(root, pack_tokens([]), 16) == []
    assert len(page_keys(root, pack_tokens(range(31)), 16)) == 1


@pytest.mark.parametrize(
    ("root", "tokens", "page_tokens"),
    [(b"short", b"", 16), (bytes(32), bytes(3), 16), (bytes(32), bytes(64), 0)],
)
def test_malformed_input_is_refused(root: bytes, tokens: bytes, page_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"^page keys: "):
        page_keys(NamespaceId(root), PackedTokens(tokens), page_tokens)
