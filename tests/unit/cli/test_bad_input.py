"""Every mistake of the issue: one clear line, a non-zero exit, no traceback, nothing changed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.model_files import write_json
from tests.unit.cli.conftest import Cli
from tierkv.storage.store import StoreConfig, TieredStore

SIZES = ("--pool", "8MiB", "--host", "8MiB", "--nvme", "8MiB")
PAGE_BYTES = 12288
"""One page of 16 tokens of the tiny model."""


def content(place: Path) -> dict[str, bytes]:
    """Every file below a folder, LOCK files aside: they name their last owner."""
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }


def refused(result: tuple[int, str, str], code: int, *words: str) -> None:
    """Assert one line of error that has all `words`."""
    got, out, err = result
    lines = [line for line in err.splitlines() if "WARNING" not in line]
    assert (got, out, len(lines)) == (code, "", 1), err
    assert lines[0].startswith("tierkv: error: ")
    for word in words:
        assert word in lines[0]


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A folder with an arena and an nvme folder that were used and closed."""
    folder = tmp_path / "cache"
    folder.mkdir()
    with opened_store(folder):
        pass
    return folder


@contextmanager
def opened_store(folder: Path) -> Iterator[None]:
    """The store that generate() opens with SIZES, held open."""
    store = TieredStore.open(
        StoreConfig(
            page_bytes=PAGE_BYTES,
            host_bytes=8 << 20,
            host_arena_path=folder / "arena",
            nvme_root=folder / "nvme",
            nvme_bytes=8 << 20,
        )
    )
    try:
        yield
    finally:
        store.close()


def generate(cli: Cli, model: Path, *arguments: str | Path) -> tuple[int, str, str]:
    common = ("--model", model, "--prompt", "the", "--max-tokens", "1", "--pool", "8MiB")
    return cli("generate", *common, *arguments)


def places(folder: Path) -> tuple[str | Path, ...]:
    return ("--host-arena", folder / "arena", "--nvme-dir", folder / "nvme")


# Models


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_model_that_lacks_a_file(cli: Cli, model: Path, name: str) -> None:
    (model / name).unlink()
    before = content(model)
    refused(generate(cli, model), 2, str(model))
    assert content(model) == before


def test_model_of_unknown_architecture(cli: Cli, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    write_json(
        model / "config.json",
        config | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
    )
    refused(generate(cli, model), 2, "amba")


@pytest.mark.parametrize("name", ["nowhere", "nowhere.gguf"])
def test_model_that_is_not_there(cli: Cli, tmp_path: Path, name: str) -> None:
    refused(generate(cli, tmp_path / name), 2, name)


def test_gguf_that_is_none(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "converted"))
    file = tmp_path / "junk.gguf"
    file.write_bytes(b"junk" * 64)
    refused(generate(cli, file), 2, "junk.gguf")


def test_damaged_config(cli: Cli, model: Path) -> None:
    (model / "config.json").write_text("{")
    refused(generate(cli, model), 2, "config.json")


# Places


@pytest.mark.parametrize("option", ["--nvme-dir", "--host-arena"])
def test_place_that_cannot_be_written(cli: Cli, tiny: Path, tmp_path: Path, option: str) -> None:
    """A file in the way stops even root, whom permissions do not."""
    (tmp_path / "file").write_text("mine")
    refused(generate(cli, tiny, *SIZES[:4], option, tmp_path / "file" / "cache"), 2, "file/cache")
    assert content(tmp_path) == {"file": b"mine"}


def test_place_open_in_another_process(cli: Cli, tiny: Path, cache: Path) -> None:
    with opened_store(cache):
        before = content(cache)
        refused(generate(cli, tiny, *SIZES, *places(cache)), 2, "arena", "another process")
        nvme = ("--nvme-dir", cache / "nvme")
        refused(generate(cli, tiny, *SIZES, *nvme), 2, "nvme", "in use by process")
        assert content(cache) == before


def test_manifest_of_another_format_version(cli: Cli, tiny: Path, cache: Path) -> None:
    write_json(cache / "nvme" / "manifest.json", {"format": "tierkv-nvme", "version": 99})
    before = content(cache)
    refused(generate(cli, tiny, *SIZES, *places(cache)), 2, "format version 99")
    assert content(cache) == before


def test_page_files_of_another_format_version(cli: Cli, tiny: Path, cache: Path) -> None:
    manifest = cache / "nvme" / f"pages-{PAGE_BYTES}" / "manifest.json"
    write_json(manifest, json.loads(manifest.read_text()) | {"version": 99})
    before = content(cache)
    refused(generate(cli, tiny, *SIZES, *places(cache)), 2, "format version 99")
    assert content(cache) == before


def test_arena_of_another_format_version(cli: Cli, tiny: Path, cache: Path) -> None:
    with (cache / "arena").open("r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(4, "little"))
    before = content(cache)
    refused(generate(cli, tiny, *SIZES, *places(cache)), 2, "format version 99")
    assert content(cache) == before


def test_arena_path_of_a_file_that_is_none(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("Dear reader, " * 1000)
    before = content(tmp_path)
    refused(
        generate(cli, tiny, *SIZES[:4], "--host-arena", tmp_path / "letter"),
        2,
        "not a TierKV arena",
    )
    assert content(tmp_path) == before


# Sizes


@pytest.mark.parametrize("option", ["--pool", "--host", "--nvme"])
def test_c3_budget_smaller_than_one_page(cli: Cli, tiny: Path, tmp_path: Path, option: str) -> None:
    sizes = dict(zip(SIZES[::2], SIZES[1::2], strict=True)) | {option: "1KiB"}
    flags = [part for pair in sizes.items() for part in pair]
    refused(generate(cli, tiny, *flags, "--nvme-dir", tmp_path / "nvme"), 2, "1024", "raise")


def test_c3_host_budget_above_memory(cli: Cli, tiny: Path) -> None:
    refused(generate(cli, tiny, "--host", "4096TiB"), 2, "memory", "lower")


@pytest.mark.parametrize("page_tokens", ["0", "65", "-1"])
def test_page_tokens_out_of_range(cli: Cli, tiny: Path, page_tokens: str) -> None:
    refused(generate(cli, tiny, "--page-tokens", page_tokens), 2, "page_tokens")


# Requests


def test_prompt_longer_than_the_context(cli: Cli, tiny: Path) -> None:
    arguments = ("--model", tiny, "--prompt", "the and " * 600, "--pool", "8MiB")
    refused(cli("generate", *arguments), 1, "1024")


def test_prompt_longer_than_the_pool(cli: Cli, tiny: Path) -> None:
    arguments = ("--model", tiny, "--prompt", "the and " * 100, "--pool", str(4 * PAGE_BYTES))
    got, out, err = cli("generate", *arguments)
    assert (got in (1, 2), out, err.count("\n")) == (True, "", 1), err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--temperature", "-1"), "temperature"),
        (("--top-p", "0"), "top_p"),
        (("--top-k", "-5"), "top_k"),
        (("--seed", "-1"), "seed"),
    ],
)
def test_sampling_out_of_range(cli: Cli, tiny: Path, arguments: tuple[str, str], word: str) -> None:
    refused(generate(cli, tiny, *arguments), 1, word)


def test_empty_prompt(cli: Cli, tiny: Path) -> None:
    refused(cli("generate", "--model", tiny, "--prompt", ""), 1, "prompt")


def test_prompt_file_that_is_not_there_or_no_text(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    refused(cli("generate", "--model", tiny, "--prompt", f"@{tmp_path}/none"), 2, "none")
    (tmp_path / "binary").write_bytes(b"ok\xff")
    refused(cli("generate", "--model", tiny, "--prompt", f"@{tmp_path}/binary"), 2, "UTF-8")


def test_model_without_a_template_cannot_chat(cli: Cli, model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    write_json(model / "tokenizer_config.json", config)
    refused(generate(cli, model, "--chat"), 2, "chat template")


# Servers


def test_a1_empty_key_is_no_key(cli: Cli, tiny: Path) -> None:
    refused(cli("engine", "serve", "--model", tiny, "--api-key", ""), 2, "--api-key")


def test_a1_public_server_without_a_key_is_warned_about(cli: Cli, tmp_path: Path) -> None:
    arguments = ("engine", "serve", "--model", tmp_path / "nowhere", "--bind")
    assert "set a key" in cli(*arguments, "0.0.0.0")[2]
    assert "set a key" not in cli(*arguments, "0.0.0.0", "--api-key", "k")[2]
    for loopback in ("127.0.0.1", "::1", "localhost"):
        assert "set a key" not in cli(*arguments, loopback)[2]


def test_server_on_an_address_that_is_not_ours(cli: Cli, tiny: Path) -> None:
    sizes = ("--pool", "8MiB", "--host", "0")
    arguments = ("--model", tiny, "--bind", "192.0.2.1", "--api-key", "k", *sizes)
    refused(cli("engine", "serve", *arguments), 2, "listen on 192.0.2.1")


@pytest.mark.parametrize("option", ["--max-body", "--pool", "--host", "--nvme"])
def test_bad_size_of_a_server(cli: Cli, tiny: Path, tmp_path: Path, option: str) -> None:
    arguments = ("--model", tiny, "--nvme-dir", tmp_path / "nvme", option, "much")
    refused(cli("engine", "serve", *arguments), 2, f"{option}: expected a size")


# The real process


def test_the_process_ends_with_the_code_and_the_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tierkv.cli.main", "generate", "--prompt", "a"]
    done = subprocess.run(
        [*command, "--model", str(tmp_path / "nowhere")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tierkv: error: ") and done.stderr.count("\n") == 1
