"""What is done before copies serve: the store's memory is found, the faster way is remembered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.memory_tier import MemoryHostTier
from tierkv.engine.serve import copies, opening
from tierkv.storage.clock import SystemClock
from tierkv.storage.device import address_of
from tierkv.storage.errors import ConfigError, TierClosedError, TierIOError
from tierkv.storage.store import TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.transfer.cpu import CpuTransfer

PAGE_BYTES = 6000
KV_SHAPE = (3, 2, 5, 4, 1, 2)


@pytest.mark.parametrize("anonymous", [True, False])
def test_the_arena_of_a_store_is_found_by_its_contract(tmp_path: Path, anonymous: bool) -> None:
    path = None if anonymous else tmp_path / "arena"
    store = TieredStore(HostTier(path, PAGE_BYTES, 16 * 16384))
    geometry = store.arena_geometry()
    found = copies.host_memory(store)
    assert found is not None
    assert found.memory.nbytes == geometry.total_bytes
    assert found.unit_bytes == geometry.slot_bytes
    assert found.first_bytes == geometry.first_slot + geometry.payload_offset
    with store.reserve(1) as reservation:
        distance = address_of(reservation.views[0]) - address_of(found.memory)
        assert distance == found.first_bytes + reservation.slots[0] * found.unit_bytes
    found.memory.release()
    store.check()
    assert store.stats().tiers[0].reserved_pages == 0
    store.close()


def test_pages_of_separate_memory_are_not_registered() -> None:
    store = TieredStore(MemoryHostTier(PAGE_BYTES, 4))
    transfer = CpuTransfer(torch.zeros(KV_SHAPE))
    assert copies.host_memory(store) is None
    assert copies.register_store(transfer, store) == 0
    transfer.close()
    store.close()


def test_the_measured_way_is_kept_and_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = CpuTransfer(torch.zeros(KV_SHAPE))
    path = tmp_path / "below" / "copies.json"
    measured = copies.choose_method(transfer, path, SystemClock())
    assert measured is not None
    assert copies.read_calibration(path) == measured

    def never(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(copies, "calibrate", never)
    assert copies.choose_method(transfer, path, SystemClock()) == measured
    transfer.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"out_method": 3}'])
def test_a_broken_file_is_measured_anew(tmp_path: Path, text: str) -> None:
    transfer = CpuTransfer(torch.zeros(KV_SHAPE))
    path = tmp_path / "copies.json"
    path.write_text(text)
    measured = copies.choose_method(transfer, path, SystemClock())
    assert measured is not None
    assert copies.read_calibration(path) == measured
    transfer.close()


def test_a_device_that_cannot_be_measured_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: object) -> None:
        raise TierIOError("calibrate copies: one did not end")

    monkeypatch.setattr(copies, "calibrate", slow)
    transfer = CpuTransfer(torch.zeros(KV_SHAPE))
    assert copies.choose_method(transfer, tmp_path / "copies.json", SystemClock()) is None
    assert not list(tmp_path.iterdir())
    transfer.close()


def test_a_transfer_that_cannot_be_prepared_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = CpuTransfer(torch.zeros(KV_SHAPE))
    monkeypatch.setattr(copies, "open_transfer", lambda kv: opened)

    def refuse(*_: object) -> None:
        raise ConfigError("no")

    monkeypatch.setattr(copies, "register_store", refuse)
    store = TieredStore(MemoryHostTier(PAGE_BYTES, 4))
    with pytest.raises(ConfigError):
        copies.open_copies(torch.zeros(KV_SHAPE), store, True, None, SystemClock())
    with pytest.raises(TierClosedError):
        opened.gather([0], [memoryview(bytearray(opened.page_bytes))])
    store.close()


def test_the_device_that_was_asked_for_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opening, "cuda_problem", lambda: "the driver is too old; install a newer")
    with pytest.raises(ConfigError, match="the driver is too old; install a newer"):
        opening.choose_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert opening.choose_device("auto") == (torch.device("cpu"), torch.float32)
    assert not caplog.records, "a build without CUDA was chosen on purpose"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert opening.choose_device("auto") == (torch.device("cpu"), torch.float32)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the driver is too old; install a newer" in line
    monkeypatch.setattr(opening, "cuda_problem", lambda: None)
    assert opening.choose_device("auto") == (torch.device("cuda"), torch.bfloat16)
    assert opening.choose_device("cpu") == (torch.device("cpu"), torch.float32)
