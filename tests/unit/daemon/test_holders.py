"""Who may be writing which slot, across two lives of a daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tierkv.daemon.holders import Holders, process_start
from tierkv.daemon.peers import Peer


def test_r3_living_holders_are_found_by_the_next_daemon(tmp_path: Path) -> None:
    path = tmp_path / "holders"
    me, start = os.getpid(), process_start(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    holders = Holders(path, 100)
    holders.hold([3, 5], me, start)
    holders.hold([7], child.pid, process_start(child.pid))
    holders.hold([9], me, start + 1)
    holders.free([5])
    again = Holders(path, 100)
    assert set(again.living()) == {3, 7}
    assert again.living()[3] == (me, start)
    child.communicate()
    assert set(again.living()) == {3}
    assert process_start(child.pid) == 0


def test_another_slot_count_forgets(tmp_path: Path) -> None:
    path = tmp_path / "holders"
    Holders(path, 10).hold([1], os.getpid(), process_start(os.getpid()))
    assert Holders(path, 20).living() == {}


def test_remembered_peer_is_the_same_process_or_gone() -> None:
    me = os.getpid()
    peer = Peer.remembered(me, process_start(me))
    assert peer.known and not peer.gone
    peer.close()
    assert Peer.remembered(me, process_start(me) + 1).gone
