"""The real server: `tierkv engine serve` as a process, a tiny model, real sockets and signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout

from tests.support.model_files import write_model

DEADLINE_S = 60
PROMPT = "the and in " * 20
PAGE_TOKENS = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder)
    return folder


class Server:
    """One process and its address."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def stop(self, number: int) -> tuple[int, str]:
        """Send a signal; return exit code and standard error."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, err


@contextmanager
def serving(model: Path, *arguments: str | Path) -> Iterator[Server]:
    """A server that accepts connections; killed at the end if it still runs."""
    command = [sys.executable, "-m", "tierkv.cli.main", "engine", "serve", "--port", "0"]
    # A model this small is computed faster than loaded: where tokens came from is tested here.
    common = ["--model", str(model), "--pool", "8MiB", "--host", "8MiB", "--threads", "1"]
    common += ["--restore", "load"]
    process = subprocess.Popen(
        [*command, *common, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "TIERKV_API_KEY"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), process.communicate(timeout=10)
        yield Server(process, line.split()[-1])
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


@asynccontextmanager
async def session(server: Server) -> AsyncIterator[ClientSession]:
    timeout = ClientTimeout(total=DEADLINE_S)
    async with ClientSession(server.url, timeout=timeout) as client:
        yield client


async def complete(client: ClientSession, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0} | fields
    async with client.post("/v1/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def idle(client: ClientSession) -> dict[str, Any]:
    """Ask for /stats until no request is in the engine; each round trip is the wait."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with client.get("/stats") as response:
                stats: dict[str, Any] = await response.json()
            if stats["running"] + stats["waiting"] == 0:
                return stats


async def test_routes_of_a_real_engine(tiny: Path) -> None:
    with serving(tiny) as server:
        async with session(server) as client:
            cold = await complete(client)
            warm = await complete(client)
            assert warm["choices"] == cold["choices"]
            assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= warm["usage"]["prompt_tokens"] - PAGE_TOKENS
            assert warm["tierkv"]["cached_tokens"]["gpu"] == cached
            salted = await complete(client, cache_salt="another tenant")
            assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert salted["choices"] == cold["choices"]

            body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True}
            async with client.post("/v1/completions", json=body) as response:
                frames = (await response.text()).split("\n\n")
            assert frames[-2] == "data: [DONE]"
            events = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
            text = "".join(event["choices"][0]["text"] for event in events)
            assert text == cold["choices"][0]["text"]

            chat = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 4}
            async with client.post("/v1/chat/completions", json=chat) as response:
                answer = await response.json()
                assert response.status == 200
                assert answer["usage"]["completion_tokens"] == 4
            bad = {"messages": [{"role": "stranger", "content": "the"}]}
            async with client.post("/v1/chat/completions", json=bad) as response:
                assert response.status == 400
                assert "stranger" in (await response.json())["error"]["message"]

            async with client.get("/metrics") as response:
                metrics = await response.text()
            assert 'tierkv_request_cached_tokens_total{tier="gpu"}' in metrics
            assert 'tierkv_tier_capacity_pages{tier="host"}' in metrics
            async with client.get("/v1/models") as response:
                assert (await response.json())["data"][0]["id"] == "tiny"
            assert (await idle(client))["failed"] == 0


async def test_w1_sixteen_at_once_answer_as_one_alone(tiny: Path) -> None:
    prompts = [f"{'the and ' * (3 + number)}{number}" for number in range(16)]
    with serving(tiny) as server:
        async with session(server) as client:
            alone = [await complete(client, prompt=prompt, cache_salt="a") for prompt in prompts]
            together = await asyncio.gather(*(complete(client, prompt=p) for p in prompts))
            batch = await complete(client, prompt=prompts, cache_salt="b")
    texts = [answer["choices"][0]["text"] for answer in alone]
    assert [answer["choices"][0]["text"] for answer in together] == texts
    assert [choice["text"] for choice in batch["choices"]] == texts


async def test_h3_client_that_leaves_frees_its_request(tiny: Path) -> None:
    with serving(tiny) as server:
        async with session(server) as client:
            body = {"prompt": "the", "max_tokens": 1000, "ignore_eos": True, "stream": True}
            async with client.post("/v1/completions", json=body) as response:
                assert (await response.content.readline()).startswith(b"data: ")
                response.close()
            stats = await idle(client)
            assert stats["generated_tokens"] < 1000
            assert stats["cache"]["protected_tokens"] == 0


async def test_prompt_longer_than_the_context_is_a_400(tiny: Path) -> None:
    with serving(tiny, "--max-context", "64") as server:
        async with session(server) as client:
            async with client.post("/v1/completions", json={"prompt": PROMPT * 9}) as response:
                assert response.status == 400
                assert (await response.json())["error"]["code"] == "context_length_exceeded"
            assert (await complete(client, prompt="the"))["usage"]["completion_tokens"] > 0


async def test_sigterm_lets_running_requests_finish(tiny: Path) -> None:
    with serving(tiny) as server:
        async with session(server) as client:
            body = {"prompt": "the", "max_tokens": 200, "ignore_eos": True, "stream": True}
            async with client.post("/v1/completions", json=body) as response:
                await response.content.readline()
                server.process.send_signal(signal.SIGTERM)
                rest = await response.text()
            assert rest.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length"' in rest
        _, err = server.process.communicate(timeout=DEADLINE_S)
        assert (server.process.returncode, err) == (0, "")


async def test_sigterm_aborts_what_outlasts_the_drain(tiny: Path) -> None:
    with serving(tiny, "--drain-s", "0") as server:
        async with session(server) as client:
            body = {"prompt": "the", "max_tokens": 1000, "ignore_eos": True, "stream": True}
            async with client.post("/v1/completions", json=body) as response:
                await response.content.readline()
                code, err = await asyncio.to_thread(server.stop, signal.SIGTERM)
        assert (code, err) == (0, "")


def test_interrupt_is_130_and_quiet(tiny: Path) -> None:
    with serving(tiny) as server:
        assert server.stop(signal.SIGINT) == (130, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_r1_a_new_server_finds_the_old_ones_prefixes(
    tiny: Path, tmp_path: Path, number: int
) -> None:
    """A stop in order keeps the pool; kill -9 keeps what was written through before it."""
    arena, folder = tmp_path / "arena", tmp_path / "nvme"
    places: list[str | Path] = ["--host-arena", arena, "--nvme-dir", folder, "--nvme", "8MiB"]
    if number == signal.SIGKILL:
        places += ["--write-policy", "write_through", "--admission", "admit_all"]
    with serving(tiny, *places) as server:
        async with session(server) as client:
            cold = await complete(client)
            if number == signal.SIGKILL:
                await durable(client)
        server.stop(number)
    with serving(tiny, *places) as server:
        async with session(server) as client:
            warm = await complete(client)
    assert warm["choices"] == cold["choices"]
    assert warm["tierkv"]["cached_tokens"]["host"] >= cold["usage"]["prompt_tokens"] - PAGE_TOKENS


async def durable(client: ClientSession) -> None:
    """Ask for /stats until host and nvme hold the same pages, and some."""
    async with asyncio.timeout(DEADLINE_S):
        pages = [0, 0]
        while pages[0] == 0 or pages[0] != pages[1]:
            async with client.get("/stats") as response:
                store = (await response.json())["store"]
            pages = [tier["committed_pages"] for tier in store["tiers"]]


async def test_stat_shows_a_running_server_and_its_files_are_taken(
    tiny: Path, tmp_path: Path
) -> None:
    arena = tmp_path / "arena"
    with serving(tiny, "--host-arena", arena) as server:
        stat = [sys.executable, "-m", "tierkv.cli.main", "stat", "--json"]
        running = await asyncio.to_thread(_run, [*stat, "--url", server.url])
        files = await asyncio.to_thread(_run, [*stat, "--host-arena", str(arena)])
    assert running.returncode == 0
    assert [tier["name"] for tier in json.loads(running.stdout)["tiers"]] == ["host"]
    assert (files.returncode, files.stdout) == (2, "")
    assert "--url" in files.stderr


def test_port_in_use_is_one_line(tiny: Path) -> None:
    with serving(tiny) as server:
        port = server.url.rpartition(":")[2]
        command = [sys.executable, "-m", "tierkv.cli.main", "engine", "serve", "--model", str(tiny)]
        second = _run([*command, "--pool", "8MiB", "--host", "0", "--port", port])
    assert (second.returncode, second.stdout) == (2, "")
    assert second.stderr.startswith(f"tierkv: error: listen on 127.0.0.1:{port}")
    assert second.stderr.count("\n") == 1


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
