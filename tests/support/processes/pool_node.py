"""Child of the pool's tests: one node of a pool, told what to do line by line.

    python -m tests.support.processes.pool_node SETTINGS

SETTINGS is JSON: "listen" and "members" (addresses as text), and arguments of
tests.support.pool_nodes.start_node. Says {"ready": EPOCH}, then answers each line of standard
input, JSON as well:

    {"do": "put", "first": N, "count": N}      {"flushed": BOOL}
    {"do": "get", "first": N, "count": N}      {"found": N}; a wrong byte ends the process
    {"do": "here", "first": N, "count": N}     {"here": N}, pages in its own tiers
    {"do": "status"}                           Pool.status()
    {"do": "check"}                            {}
    {"do": "stick", "after": BYTES}            {}; from then on each connection that sends pages
                                               stops for good after so many bytes, and the line
                                               {"stuck": BYTES} is said
    {"do": "drain"}                            {"drained": BOOL}
    {"do": "stop"}                             {"closed": BOOL}, and it ends
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.pages import page_keys, put_store, take_content
from tests.support.pool_nodes import WAIT_S, Node, start_node
from tierkv.storage.pool.config import Address
from tierkv.storage.transport import stream
from tierkv.storage.types import Buffer, PageKey

LONG_BYTES = 64 << 10
"""What is as long as this is pages; messages and greetings pass."""


def say(answer: dict[str, Any]) -> None:
    """One write call a line."""
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


class StuckStream(stream.PlainStream):
    """Sends so many bytes of pages, says so, and then no more."""

    left: int | None = None

    def send(self, buffers: Sequence[Buffer], step_s: float, deadline: float | None = None) -> None:
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if self.left is None or size < LONG_BYTES:
            super().send(buffers, step_s, deadline)
            return
        super().send([b"".join(buffers)[: self.left]], step_s, deadline)
        say({"stuck": self.left})
        threading.Event().wait(WAIT_S)


def keys_of(order: dict[str, Any]) -> list[PageKey]:
    return page_keys(*range(order["first"], order["first"] + order["count"]))


def obey(node: Node, order: dict[str, Any]) -> dict[str, Any]:
    """Do what one line says."""
    what = order["do"]
    if what == "put":
        put_store(node.store, keys_of(order))
        return {"flushed": node.remote.flush(WAIT_S)}
    if what == "get":
        return {"found": take_content(node.store, keys_of(order), order.get("deadline_s", WAIT_S))}
    if what == "here":
        return {"here": sum(node.store.lookup_here(keys_of(order)))}
    if what == "status":
        return node.pool.status()
    if what == "stick":
        StuckStream.left = order["after"]
        return {}
    if what == "drain":
        return {"drained": node.pool.drain(WAIT_S)}
    assert what == "check", order
    node.check()
    return {}


def main(arguments: list[str]) -> int:
    """Serve until told to stop, or until the parent is gone."""
    settings = json.loads(arguments[0])
    listen = Address.parse(settings.pop("listen"))
    members = [Address.parse(text) for text in settings.pop("members")]
    for name in ("arena", "epoch", "folder"):
        if settings.get(name):
            settings[name] = Path(settings[name])
    stream.PlainStream = StuckStream  # type: ignore[misc]
    node = start_node(listen, members, **settings)
    say({"ready": node.pool.own_epoch})
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "stop":
            closed = node.pool.close(WAIT_S)
            node.store.close()
            say({"closed": closed})
            return 0
        say(obey(node, order))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
