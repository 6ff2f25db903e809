"""`tierkv generate`: one prompt through an engine in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.cli import options as shared
from tierkv.cli.console import write_json, write_line, write_note
from tierkv.storage.errors import ConfigError, TierKVError

if TYPE_CHECKING:
    from tierkv.engine.serve.engine import Engine
    from tierkv.engine.serve.request import RequestOutput
    from tierkv.engine.serve.sampler import SamplingParams

PROMPT_BYTES_MAX = 64 << 20


def generate(
    prompt: Annotated[str, typer.Option("--prompt", help="Text, @FILE, or - for standard input.")],
    model: shared.ModelOption = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="1 keeps all.")] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end token.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End at this text. May be repeated.")
    ] = None,
    page_tokens: shared.PageTokensOption = 16,
    pool: shared.PoolOption = "1GiB",
    store: shared.StoreOption = None,
    host: shared.HostOption = None,
    host_arena: shared.HostArenaOption = None,
    nvme_dir: shared.NvmeDirOption = None,
    nvme: shared.NvmeOption = None,
    write_policy: shared.WritePolicyOption = shared.WritePolicyChoice.WRITE_THROUGH,
    admission: shared.AdmissionOption = shared.AdmissionChoice.ALL,
    max_context: shared.MaxContextOption = None,
    device: shared.DeviceOption = shared.DeviceChoice.AUTO,
    restore: shared.RestoreOption = shared.RestoreChoice.AUTO,
    threads: shared.ThreadsOption = None,
    as_json: shared.JsonOption = False,
) -> int:
    """Generate text for one prompt; with cache options, keep and reuse its prefix."""
    text = read_prompt(prompt)
    cache = shared.CacheOptions(
        page_tokens=page_tokens,
        pool=pool,
        host=host,
        host_arena=host_arena,
        nvme_dir=nvme_dir,
        nvme=nvme,
        write_policy=write_policy,
        admission=admission,
        store=store,
    )
    engine_options = shared.EngineOptions(model, device, threads, max_context, restore=restore)
    config = shared.engine_config_from_options(engine_options, cache)

    from tierkv.engine.serve.engine import Engine
    from tierkv.engine.serve.sampler import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )
    live = not as_json and sys.stdout.isatty()
    with Engine.open(config) as engine:
        ids = encode(engine, text, chat)
        output = asyncio.run(_run(engine, ids, params, stop or [], live))
        if cache.outlives_process:
            shared.keep_prefixes(engine)
    return _report(output, live, as_json)


def read_prompt(prompt: str) -> str:
    """The prompt's text: itself, a file's or standard input's. Raises ConfigError."""
    if prompt != "-" and not prompt.startswith("@"):
        return prompt
    name = "standard input" if prompt == "-" else prompt[1:]
    try:
        if prompt == "-":
            data = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(PROMPT_BYTES_MAX + 1)
        text = data.decode()
    except OSError as error:
        raise ConfigError(
            f"--prompt: cannot read {name}: {error.strerror}; check the path"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--prompt: {name} is not UTF-8 at byte {error.start}; convert it"
        ) from None
    if len(data) > PROMPT_BYTES_MAX:
        raise ConfigError(
            f"--prompt: {name} is above {PROMPT_BYTES_MAX} bytes; give a shorter prompt"
        )
    return text


def encode(engine: Engine, text: str, chat: bool) -> list[int]:
    """Token ids of the prompt, rendered as the only user message when `chat`."""
    if not chat:
        return engine.tokenizer.encode(text)
    rendered = engine.chat.render([{"role": "user", "content": text}])
    return engine.tokenizer.encode(rendered, add_special_tokens=False)


async def _run(
    engine: Engine, ids: list[int], params: SamplingParams, stop: list[str], live: bool
) -> RequestOutput:
    """Run one prompt to its end; `live` shows the text as it comes."""
    output = None
    async for event in engine.stream(ids, params, stop=stop):
        if live:
            sys.stdout.write(event.text)
            sys.stdout.flush()
        output = event.output
    assert output is not None, "a stream ends with its output"
    return output


def _report(output: RequestOutput, live: bool, as_json: bool) -> int:
    """Print what is not on the screen yet. Raises TierKVError when the request broke."""
    if output.error is not None:
        raise TierKVError(f"generate: {output.error}")
    if as_json:
        write_json(dataclasses.asdict(output))
        return 0
    write_line("" if live else output.text)
    cached = output.cached
    ttft = "no token" if output.ttft_s is None else f"first token after {output.ttft_s:.3f} s"
    write_note(
        f"{ttft}, {output.total_s:.3f} s in all; prompt {len(output.prompt_token_ids)} tokens, "
        f"reused gpu {cached.gpu} host {cached.host} nvme {cached.nvme} remote {cached.remote}; "
        f"{len(output.token_ids)} generated, ended by {output.finish_reason.value}"
    )
    return 0
