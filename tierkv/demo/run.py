"""The main job on a real model: one prompt, restored from every tier, timed and compared.

Starts workers as processes of their own and kills them with -9. Owns the directory it is given
and the arena file, which it removes at the end. Called by `tierkv demo`.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierkv.demo.remote import Nodes
from tierkv.engine.serve.chat import ChatTemplate
from tierkv.engine.serve.gguf import resolve_model
from tierkv.engine.serve.tokenizer import Tokenizer
from tierkv.models import bundled_gguf, default_model_cache
from tierkv.scenario import USERS, conversation, system_prompt
from tierkv.storage.errors import ConfigError, TierKVError

log = logging.getLogger(__name__)

WORKER_START_S = 120.0
ANSWER_S = 180.0
SECTIONS_MAX = 400


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the user may choose. Sizes in bytes."""

    model: Path | None = None
    """HF folder or GGUF file; None: the bundled SmolLM2."""
    directory: Path | None = None
    """Where nvme files go; None: a temporary one, removed at the end."""
    prefix_tokens: int = 2000
    """Least length of the shared system prompt."""
    max_tokens: int = 16
    pool_bytes: int = 1 << 30
    host_bytes: int = 1 << 30
    nvme_bytes: int = 2 << 30
    remote: bool = False
    """Go on over three daemons in network namespaces. Needs root."""


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One case: the same prompt, from one more place."""

    case: str
    source: str
    """Where the prefix came from, in words."""
    ttft_s: float
    reused_tokens: int
    identical: bool
    """The generated tokens equal those of the cold run."""


@dataclass(slots=True)
class DemoResult:
    """Everything the demo measured."""

    model: str
    device: str
    prompt_tokens: int
    rows: list[DemoRow] = field(default_factory=list)
    text: str = ""
    """What the model answered."""


def run_demo(options: DemoOptions, progress: Callable[[str], None] | None = None) -> DemoResult:
    """Run all cases; `progress` hears one line a stage. Raises TierKVError when a worker fails."""
    tell = progress or (lambda _: None)
    tell("preparing the model")
    model = resolve_model(options.model or bundled_gguf(), default_model_cache())
    with _places(options.directory) as (arena, nvme):
        demo = _Demo(options, model, arena, nvme, tell)
        if not options.remote:
            return demo.run()
        # First, so that whoever may not make hosts hears it before anything was computed.
        tell("starting three daemons")
        with Nodes(options.host_bytes) as nodes:
            return demo.run(nodes)


class _Demo:
    """The cases in order. Owns the worker that is running."""

    def __init__(
        self,
        options: DemoOptions,
        model: Path,
        arena: Path,
        nvme: Path,
        tell: Callable[[str], None],
    ) -> None:
        self._options = options
        self._model = model
        self._arena = arena
        self._nvme = nvme
        self._tell = tell
        self._tokenizer = Tokenizer.from_folder(model)
        self._template = ChatTemplate.from_folder(model)
        self._system = self._long_system_prompt()
        self._prompt = self._tokens(0, len(USERS[0][1]))

    def run(self, nodes: Nodes | None = None) -> DemoResult:
        """All cases; those over the network when there are nodes."""
        tell = self._tell
        tell("starting a worker")
        with _Worker(self._start_options()) as worker:
            result = DemoResult(self._model.name, worker.device, len(self._prompt))
            tell("recomputing the prompt")
            cold = self._ask(worker, salt="cold")
            result.text = cold["text"]
            self._add(result, cold, cold, "cold", "recomputed")
            tell("several users, several turns")
            self._traffic(worker)
            tell("hit on the GPU pool")
            self._add(result, cold, self._ask(worker), "gpu", "GPU pool")
            tell("restoring from host RAM")
            worker.ask({"do": "drop", "tier": "gpu"})
            self._add(result, cold, self._ask(worker), "host", "host RAM")
            tell("restoring from NVMe")
            worker.ask({"do": "drop", "tier": "host"})
            self._add(result, cold, self._ask(worker), "nvme", "NVMe")
            worker.ask({"do": "flush"})
            worker.kill()
        tell("a new worker after kill -9")
        with _Worker(self._start_options()) as worker:
            answer = self._ask(worker)
            self._add(result, cold, answer, "worker_restart", "host RAM of the killed worker")
            worker.kill()
        tell("a new worker after a reboot")
        self._arena.unlink()
        with _Worker(self._start_options()) as worker:
            self._add(result, cold, self._ask(worker), "reboot", "NVMe, host RAM gone")
        if nodes is not None:
            self._over_the_network(result, cold, nodes)
        return result

    def _over_the_network(self, result: DemoResult, cold: dict[str, Any], nodes: Nodes) -> None:
        """See tierkv.demo.remote."""
        self._tell("recomputing the prompt on host A")
        with _Worker(self._start_options(nodes.socket(0))) as worker:
            self._ask(worker)
            worker.ask({"do": "flush"})
            nodes.await_copies(0)
            worker.kill()
        self._tell("restoring on host B, over the network")
        pages = nodes.pages(0)
        with _Worker(self._start_options(nodes.socket(1))) as worker:
            nodes.await_known(1, pages)
            answer = self._ask(worker)
            self._add(result, cold, answer, "remote", _from("host A's daemon", answer))
            worker.kill()
        self._tell("restoring again after host A's daemon was killed")
        nodes.empty(1)
        nodes.kill(0)
        with _Worker(self._start_options(nodes.socket(1))) as worker:
            nodes.await_known(1, pages)
            answer = self._ask(worker)
            source = _from("host C's copy, A's daemon killed", answer)
            self._add(result, cold, answer, "remote_replica", source)
            worker.kill()

    def _traffic(self, worker: _Worker) -> None:
        """All users ask their questions in turn; none sees the last turn of the first user."""
        for turn in range(1, max(len(exchanges) for _, exchanges in USERS) + 1):
            for user, (_, exchanges) in enumerate(USERS):
                if turn <= len(exchanges) and not (user == 0 and turn == len(exchanges)):
                    self._ask(worker, prompt=self._tokens(user, turn))
        # The measured prompt itself, so that every later case finds all of it.
        self._ask(worker)

    def _ask(
        self, worker: _Worker, salt: str = "", prompt: list[int] | None = None
    ) -> dict[str, Any]:
        return worker.ask(
            {
                "do": "generate",
                "prompt": prompt or self._prompt,
                "max_tokens": self._options.max_tokens,
                "salt": salt,
            }
        )

    def _add(
        self,
        result: DemoResult,
        cold: dict[str, Any],
        answer: dict[str, Any],
        case: str,
        source: str,
    ) -> None:
        row = DemoRow(
            case=case,
            source=source,
            ttft_s=answer["ttft_s"],
            reused_tokens=sum(answer["cached"].values()),
            identical=answer["token_ids"] == cold["token_ids"],
        )
        result.rows.append(row)

    def _long_system_prompt(self) -> str:
        """The shortest manual that makes the system prompt long enough."""
        for sections in range(4, SECTIONS_MAX):
            text = system_prompt(sections)
            if len(self._tokenizer.encode(text)) >= self._options.prefix_tokens:
                return text
        raise ConfigError(
            f"demo: a prefix of {self._options.prefix_tokens} tokens is longer than its manual; "
            "choose fewer"
        )

    def _tokens(self, user: int, turns: int) -> list[int]:
        text = self._template.render(conversation(self._system, user, turns))
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _start_options(self, socket: Path | None = None) -> dict[str, Any]:
        """What a worker is told; with a socket, pages lie in that daemon."""
        return {
            "socket": None if socket is None else str(socket),
            "model": str(self._model),
            "arena": str(self._arena),
            "nvme": str(self._nvme),
            "pool_bytes": self._options.pool_bytes,
            "host_bytes": self._options.host_bytes,
            "nvme_bytes": self._options.nvme_bytes,
        }


def _from(whom: str, answer: dict[str, Any]) -> str:
    """Where a prefix came from; how much of it came over the network, unless that is all."""
    remote, reused = answer["cached"]["remote"], sum(answer["cached"].values())
    return whom if remote == reused else f"{whom}: {remote:,} tokens"


class _Worker:
    """A worker process and the line protocol with it. A context manager: ends the process."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tierkv.demo.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._buffer = b""
        try:
            self._send(options)
            self.device: str = self._receive(WORKER_START_S)["device"]
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send one command and wait for its answer, within a bound."""
        self._send(command)
        return self._receive(ANSWER_S)

    def kill(self) -> None:
        """kill -9, and wait until the process is gone. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=30)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise TierKVError("demo: the worker has ended; see its message above") from error

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([handle], [], [], timeout_s)[0]:
                raise TierKVError(f"demo: the worker has not answered within {timeout_s:.0f} s")
            piece = os.read(handle, 1 << 16)
            if not piece:
                raise TierKVError("demo: the worker has ended; see its message above")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if message.get("error"):
            raise ConfigError(message["error"])
        return message


@contextmanager
def _places(directory: Path | None) -> Iterator[tuple[Path, Path]]:
    """Arena file and nvme folder of this run; what was made here is removed at the end."""
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    arena = base / f"tierkv-demo-{os.getpid()}.arena"
    made = None
    if directory is None:
        directory = made = Path(tempfile.mkdtemp(prefix="tierkv-demo-"))
    try:
        yield arena, directory / "nvme"
    finally:
        arena.unlink(missing_ok=True)
        if made is not None:
            shutil.rmtree(made)
