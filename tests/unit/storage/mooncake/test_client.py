"""Codes of the library become answers; nothing is called after close()."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from typing import Any

import pytest

from tests.unit.storage.mooncake.fake_library import Cluster, FakeLibrary
from tierkv.storage.errors import ConfigError, TierClosedError, TierIOError
from tierkv.storage.mooncake import library as loading
from tierkv.storage.mooncake import trial
from tierkv.storage.mooncake.client import Answer, MooncakeClient, Piece, open_client
from tierkv.storage.mooncake.config import MooncakeConfig

WAIT_S = 30.0


class Memory:
    """Some bytes with an address."""

    def __init__(self, content: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(content, len(content))
        self.piece = Piece(ctypes.addressof(self._buffer), len(content))

    @property
    def content(self) -> bytes:
        return self._buffer.raw


def put(client: MooncakeClient, key: str, *parts: bytes) -> Answer:
    memory = [Memory(part) for part in parts]
    (answer,) = client.put([key], [[one.piece for one in memory]])
    return answer


def test_a_value_of_pieces_is_got_into_pieces() -> None:
    client = MooncakeClient(FakeLibrary(Cluster()), None)
    assert put(client, "a", b"head", b"body!") is Answer.DONE
    first, second = Memory(bytes(6)), Memory(bytes(3))
    assert client.get(["a"], [[first.piece, second.piece]]) == [Answer.DONE]
    assert first.content + second.content == b"headbody!"
    client.check()


def test_w7_miss_other_length_and_failure_are_three_answers() -> None:
    cluster = Cluster()
    fake = FakeLibrary(cluster)
    client = MooncakeClient(fake, None)
    for key in ("long", "short", "broken", "good"):
        length = {"long": 12, "short": 4}.get(key, 8)
        assert put(client, key, bytes(range(length))) is Answer.DONE
    cluster.broken.add("broken")
    targets = [Memory(b"\xee" * 8) for _ in range(5)]
    answers = client.get(
        ["nobody", "long", "short", "broken", "good"], [[one.piece] for one in targets]
    )
    assert answers == [
        Answer.MISS,
        Answer.OTHER_LENGTH,
        Answer.OTHER_LENGTH,
        Answer.FAILED,
        Answer.DONE,
    ]
    assert [one.content for one in targets[:3]] == [b"\xee" * 8] * 3
    assert client.last_code == -800


def test_an_empty_answer_is_a_miss_only_when_the_master_says_so() -> None:
    class Empty(FakeLibrary):
        def batch_get_into_multi_buffers(self, keys: Any, *rest: Any) -> list[int]:
            return [0] * len(keys)

    cluster = Cluster()
    client = MooncakeClient(Empty(cluster), None)
    assert put(client, "there", b"12345678") is Answer.DONE
    target = Memory(bytes(8))
    keys, targets = ["there", "nobody"], [[target.piece]] * 2
    assert client.get(keys, targets) == [Answer.FAILED, Answer.MISS]
    cluster.master_lives = False
    assert client.get(keys, targets) == [Answer.FAILED, Answer.FAILED]


def test_h1_a_silent_master_is_asked_once_for_a_whole_batch() -> None:
    class Failing(FakeLibrary):
        def batch_get_into_multi_buffers(self, keys: Any, *rest: Any) -> list[int]:
            return [-800] * len(keys)

    cluster = Cluster()
    fake = Failing(cluster)
    client = MooncakeClient(fake, None)
    cluster.master_lives = False
    target = Memory(bytes(8))
    assert client.get(list("abcd"), [[target.piece]] * 4) == [Answer.FAILED] * 4
    assert fake.calls["size"] == 1


def test_a_full_store_a_dead_master_and_what_exists() -> None:
    cluster = Cluster()
    client = MooncakeClient(FakeLibrary(cluster), None)
    cluster.room = 1
    assert put(client, "a", b"1") is Answer.DONE
    assert put(client, "a", b"2") is Answer.DONE
    assert cluster.values["a"] == b"1"
    assert put(client, "b", b"3") is Answer.NO_ROOM
    assert client.exist(["a", "b"]) == [True, False]
    assert client.remove("a") is Answer.DONE
    assert client.remove("a") is Answer.MISS
    cluster.master_lives = False
    assert client.exist(["a"]) == [None]
    assert put(client, "a", b"1") is Answer.FAILED
    assert client.remove("a") is Answer.FAILED


def test_answers_that_are_too_few_raise() -> None:
    class Few(FakeLibrary):
        def batch_is_exist(self, keys: Any) -> list[int]:
            return []

    with pytest.raises(TierIOError, match="1 keys asked, 0 answers"):
        MooncakeClient(Few(Cluster()), None).exist(["a"])


def test_close_waits_for_calls_and_nothing_is_called_after_it() -> None:
    fake = FakeLibrary(Cluster())
    client = MooncakeClient(fake, None)
    target = Memory(bytes(8))
    fake.gate.clear()
    thread = threading.Thread(target=lambda: client.get(["a"], [[target.piece]]))
    thread.start()
    assert fake.entered.wait(WAIT_S)
    assert not client.close(0.05)
    assert not fake.closed
    with pytest.raises(TierClosedError):
        client.exist(["a"])
    fake.gate.set()
    thread.join(WAIT_S)
    assert client.close(WAIT_S) and fake.closed
    assert client.close(WAIT_S)
    assert fake.calls["close"] == 1
    client.check()


def test_a_refused_registration_raises() -> None:
    client = MooncakeClient(FakeLibrary(Cluster()), None)
    client.register(Piece(4096, 10))
    with pytest.raises(TierIOError, match="register 10 bytes: the library says -600"):
        client.register(Piece(4096, 10))


# --- what cannot be opened: one line each


def test_an_absent_package_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"is not installed; pip install 'tierkv\[mooncake\]'"):
        open_client(MooncakeConfig("127.0.0.1:1"))


def test_a_library_that_cannot_be_loaded_is_one_line_that_names_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open\nshared object file")

    monkeypatch.setattr(loading, "assert_installed", lambda: None)
    monkeypatch.setattr(loading.importlib, "import_module", fail)
    with pytest.raises(ConfigError, match="libibverbs1") as caught:
        loading.new_store(MooncakeConfig("127.0.0.1:1"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (-4, b"", "ended the process that tried it"),
        (0, b"", "ended the process that tried it"),
        (0, b"noise\ncode -1\n", "does not answer as a mooncake_master"),
        (0, b"error mooncake: libnuma.so.1 is missing\n", "^mooncake: libnuma.so.1 is missing$"),
    ],
)
def test_a_trial_that_went_wrong_is_one_line(
    monkeypatch: pytest.MonkeyPatch, status: int, said: bytes, expected: str
) -> None:
    class Child:
        returncode = status

        def __init__(self, *args: object, **more: object) -> None: ...

        def communicate(self, timeout: float) -> tuple[bytes, None]:
            return said, None

        def kill(self) -> None: ...

        def wait(self) -> None: ...

    monkeypatch.setattr(trial, "_assert_reachable", lambda config: None)
    monkeypatch.setattr(trial.subprocess, "Popen", Child)
    with pytest.raises(ConfigError, match=expected) as caught:
        trial.assert_usable(MooncakeConfig("127.0.0.1:1"))
    assert "\n" not in str(caught.value)


def test_h1_a_trial_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = threading.Event()

    class Child:
        returncode = -9

        def __init__(self, *args: object, **more: object) -> None: ...

        def communicate(self, timeout: float) -> tuple[bytes, None]:
            raise subprocess.TimeoutExpired("child", timeout)

        def kill(self) -> None:
            killed.set()

        def wait(self) -> None: ...

    monkeypatch.setattr(trial, "_assert_reachable", lambda config: None)
    monkeypatch.setattr(trial.subprocess, "Popen", Child)
    with pytest.raises(ConfigError, match="it is silent"):
        trial.assert_usable(MooncakeConfig("127.0.0.1:1"))
    assert killed.is_set()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"master": "node1"}, "is not host:port"),
        ({"master": "node1:0"}, "is not host:port"),
        ({"master": ":50051"}, "is not host:port"),
        ({"protocol": "udp"}, "expected one of tcp, rdma"),
        ({"address": ""}, "must not be empty"),
        ({"segment_bytes": -1}, "segment is -1 bytes"),
        ({"batch_pages": 0}, "batch_pages is 0"),
        ({"call_s": 0.0}, "call is 0 s"),
        ({"known_s": 4000.0}, "up to 3600"),
    ],
)
def test_a_setting_that_cannot_work_is_named(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        MooncakeConfig(**{"master": "node1:50051", **changes}).validate()


def test_addresses_of_ipv6_are_in_brackets_and_the_arena_is_registered_only_for_rdma() -> None:
    assert MooncakeConfig("[::1]:50051").master_address == ("::1", 50051)
    assert not MooncakeConfig("a:1").registers_arena
    assert MooncakeConfig("a:1", protocol="rdma").registers_arena
    assert MooncakeConfig("a:1", register_arena=True).registers_arena
