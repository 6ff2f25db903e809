"""The arena that a daemon's client has mapped is found through its reservations alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tierkv.client import Client, ClientSettings
from tierkv.engine.serve.copies import host_memory
from tierkv.storage.device import address_of
from tierkv.storage.identity import Fingerprint

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
HOST_BYTES = 16 << 20
PAGE_BYTES = 6000
SETTINGS = ClientSettings(connect_s=WAIT_S, backoff_first_s=0.01, backoff_max_s=0.1, call_s=WAIT_S)
FINGERPRINT = Fingerprint(
    weights_digest=b"w" * 32,
    architecture=(("layers", 1),),
    kv_dtype="float32",
    kv_quantisation="none",
    page_tokens=16,
)


@pytest.mark.parametrize("mode", ["shared", "stream"])
def test_the_mapping_is_found_and_how_it_is_cut(tmp_path: Path, mode: str) -> None:
    command = [sys.executable, "-m", "tests.support.processes.plain_daemon", str(tmp_path)]
    daemon = subprocess.Popen([*command, str(HOST_BYTES)], cwd=ROOT)
    client = Client(tmp_path / "socket", PAGE_BYTES, FINGERPRINT, mode=mode, settings=SETTINGS)
    try:
        assert client.wait_connected(WAIT_S)
        found = host_memory(client)
        if mode == "stream":
            assert found is None, "each page is memory of its own"
            return
        assert found is not None
        assert found.memory.nbytes > HOST_BYTES // 2
        with client.reserve(3) as reservation:
            for slot, view in zip(reservation.slots, reservation.views, strict=True):
                distance = address_of(view) - address_of(found.memory)
                assert distance == found.first_bytes + slot * found.unit_bytes
        found.memory.release()
    finally:
        client.close()
        daemon.kill()
        daemon.wait(WAIT_S)
