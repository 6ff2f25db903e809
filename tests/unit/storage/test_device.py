"""The device seam: whole transfers or errors, on the real file system."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from tierkv.storage.device import DirectDevice, aligned_buffer, device_error, round_up, try_lock
from tierkv.storage.errors import TierFullError, TierIOError


def test_vectored_transfers_move_every_byte(tmp_path: Path) -> None:
    file = DirectDevice().open(tmp_path / "file", create=True)
    file.allocate(16384)
    header, payload = aligned_buffer(4096), aligned_buffer(8192)
    header[:4], payload[-4:] = b"head", b"tail"
    file.pwritev([header, payload], 4096)
    file.fdatasync()
    back = aligned_buffer(12288)
    file.preadv([back], 4096)
    assert (bytes(back[:4]), bytes(back[-4:])) == (b"head", b"tail")
    assert file.size() == 16384
    file.truncate(4096)
    assert file.size() == 4096
    file.close()
    file.close()


def test_the_file_is_private(tmp_path: Path) -> None:
    DirectDevice().open(tmp_path / "file", create=True).close()
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_w7_a_short_read_is_an_error(tmp_path: Path) -> None:
    file = DirectDevice().open(tmp_path / "file", create=True)
    file.allocate(4096)
    with pytest.raises(TierIOError, match="expected 8192 bytes, moved 4096"):
        file.preadv([aligned_buffer(8192)], 0)
    file.close()


def test_use_of_a_closed_file_is_an_error_not_another_file(tmp_path: Path) -> None:
    file = DirectDevice().open(tmp_path / "file", create=True)
    file.close()
    for use in (
        lambda: file.preadv([aligned_buffer(4096)], 0),
        lambda: file.pwritev([aligned_buffer(4096)], 0),
        file.fdatasync,
        lambda: file.allocate(4096),
        lambda: file.truncate(0),
        file.size,
    ):
        with pytest.raises(TierIOError, match="Bad file descriptor"):
            use()


def test_a_missing_file_or_folder_is_an_error(tmp_path: Path) -> None:
    device = DirectDevice()
    with pytest.raises(TierIOError, match="No such file"):
        device.open(tmp_path / "missing")
    with pytest.raises(TierIOError, match="No such file"):
        device.free_bytes(tmp_path / "missing")
    with pytest.raises(TierIOError, match="No such file"):
        device.sync_directory(tmp_path / "missing")
    device.sync_directory(tmp_path)
    assert device.free_bytes(tmp_path) > 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_c2_no_room_is_told_from_failure(code: int) -> None:
    error = device_error("write", Path("f"), OSError(code, os.strerror(code)))
    assert isinstance(error, TierIOError if code == errno.EIO else TierFullError)
    assert "\n" not in str(error)


def test_a_file_system_without_o_direct_is_used_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with caplog.at_level(logging.WARNING):
        file = DirectDevice().open(tmp_path / "file", create=True)
    assert not file.direct
    assert "o_direct=refused" in caplog.text
    file.pwritev([b"odd"], 1)
    assert file.size() == 4
    file.close()


def test_aligned_buffers_are_zeroed_exact_and_aligned() -> None:
    buffer = aligned_buffer(5000)
    assert len(buffer) == 5000
    assert not any(buffer)
    assert np.frombuffer(buffer, np.uint8).ctypes.data % 4096 == 0
    with pytest.raises(ValueError, match="positive"):
        aligned_buffer(0)
    assert [round_up(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_a_lock_is_exclusive_and_ends_with_its_descriptor(tmp_path: Path) -> None:
    first = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    second = os.open(tmp_path / "lock", os.O_RDWR)
    assert try_lock(first)
    assert not try_lock(second)
    os.close(first)
    assert try_lock(second)
    os.close(second)
