"""A daemon whose disk fails on request: the child of the fault tests.

    python -m tests.support.processes.faulty_daemon CONFIG_JSON

After "ready" it reads commands and answers "ok": "fail OPERATION ERRNO TIMES", "stall OPERATION",
"release", "heal" and "powerloss SOURCE TARGET MODE SEED" (FaultDevice.power_loss_copy), besides
what every test daemon understands.
"""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

from tests.support.daemon_process import serve
from tests.support.fault_device import FaultDevice, Stall
from tierkv.storage.store import StoreConfig, TieredStore
from tierkv.storage.tiers.host import HostTier
from tierkv.storage.tiers.nvme import NvmeTier

device = FaultDevice()
stalls: list[Stall] = []


def open_store(config: StoreConfig) -> TieredStore:
    """TieredStore.open with the fault device under nvme."""
    host = HostTier(config.host_arena_path, config.page_bytes, config.host_bytes)
    assert config.nvme_root is not None
    nvme = NvmeTier(
        config.nvme_root,
        config.page_bytes,
        config.nvme_bytes,
        device=device,
        min_free_bytes=config.nvme_min_free_bytes,
    )
    return TieredStore(host, nvme, config.rules)


def main() -> int:
    """Run the daemon until it is told to stop."""
    return serve(
        json.loads(sys.argv[1]),
        open_store,
        {
            "fail": lambda words: device.fail(
                words[0], getattr(errno, words[1]), times=int(words[2])
            ),
            "stall": lambda words: stalls.append(device.stall(words[0])),
            "release": lambda words: [stall.release() for stall in stalls].clear(),
            "heal": lambda words: device.heal(),
            "powerloss": lambda words: device.power_loss_copy(
                Path(words[0]), Path(words[1]), words[2], int(words[3])
            ),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
