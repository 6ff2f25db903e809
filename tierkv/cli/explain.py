"""`tierkv explain`: why a prompt did or did not find its pages in a running daemon.

Owns the comparison, not the facts: the fingerprint comes from the model as an engine computes it,
keys from storage.identity, tiers and namespaces from the daemon. Changes nothing there: lookups
neither extend a lease nor touch recency.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli import options as shared
from tierkv.cli.console import new_table, spinner, write_json, write_line, write_table
from tierkv.cli.daemon_settings import ConfigOption
from tierkv.cli.generate import read_prompt
from tierkv.cli.ls import DIGITS, model_of
from tierkv.cli.operator import DaemonSocket, Endpoint, SocketOption, endpoint, http_json
from tierkv.storage.errors import ConfigError, TierKVError

if TYPE_CHECKING:
    from tierkv.storage.identity import Fingerprint
    from tierkv.storage.types import PageKey

EVICTIONS_PATH = "/evictions"
TokensText = Annotated[
    str | None,
    typer.Option("--tokens", metavar="IDS", help="Token ids with commas or spaces, or @FILE."),
]


@dataclass(frozen=True, slots=True)
class Difference:
    """Another namespace of the daemon, and why it is not ours."""

    namespace: str
    model: str
    fields: list[str]


@dataclass(slots=True)
class Explanation:
    """Everything that was found out. Tokens and pages are counted from 0."""

    namespace: str
    page_tokens: int
    tokens: int
    pages: int = 0
    held: bool = False
    """The daemon knows the namespace."""
    differences: list[Difference] = field(default_factory=list)
    hit_pages: int = 0
    """Leading pages that some tier has: what a request finds."""
    hit_tiers: dict[str, int] = field(default_factory=dict)
    """How many of them by the fastest tier that has them."""
    stranded_pages: int = 0
    """Pages after the first missing one: there, but of no use without it."""
    evictions: list[dict[str, Any]] | None = None
    """Of the first missing page; None when nobody can say."""
    evictions_unknown: str | None = None
    """Why nobody can."""
    against: dict[str, int | None] | None = None

    @property
    def hit_tokens(self) -> int:
        return self.hit_pages * self.page_tokens


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about."""

    fingerprint: Fingerprint
    tokens: list[int]
    against: list[int] | None


def explain(
    model: shared.ModelOption = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Text, @FILE, or - for standard input.")
    ] = None,
    tokens: TokensText = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="A second prompt (or token ids with --tokens), or @FILE."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompts into the model's chat template.")
    ] = False,
    page_tokens: shared.PageTokensOption = 16,
    device: shared.DeviceOption = shared.DeviceChoice.AUTO,
    tenant: Annotated[str, typer.Option("--tenant", help="The engine's tenant.")] = "",
    cache_salt: Annotated[str, typer.Option("--cache-salt", help="The request's salt.")] = "",
    socket: SocketOption = None,
    config: ConfigOption = None,
    as_json: shared.JsonOption = False,
) -> int:
    """Say which pages of a prompt are there, and what differs where they are not."""
    if (prompt is None) == (tokens is None):
        raise ConfigError("explain: expected either --prompt or --tokens, exactly one of them")
    where = endpoint(config, socket)
    with spinner("explain"):
        folder = shared.resolve(model)
        fingerprint = _fingerprint(folder, device.value, page_tokens, tenant, cache_salt)
        ids = _ids(folder, prompt, tokens, chat)
        other = None
        if against is not None:
            other_prompt, other_tokens = (against, None) if prompt is not None else (None, against)
            other = _ids(folder, other_prompt, other_tokens, chat)
        found = examine(where, Question(fingerprint, ids, other))
    if as_json:
        write_json({**dataclasses.asdict(found), "hit_tokens": found.hit_tokens})
    else:
        _show(found)
    return 0


def _fingerprint(
    folder: Path, device: str, page_tokens: int, tenant: str, cache_salt: str
) -> Fingerprint:
    """The fingerprint that an engine with these options has."""
    from tierkv.engine.serve.fingerprint import build_fingerprint
    from tierkv.engine.serve.model_folder import load_config
    from tierkv.engine.serve.opening import choose_device
    from tierkv.engine.serve.weights_digest import weights_digest

    if not 1 <= page_tokens <= 64:
        raise ConfigError(f"--page-tokens: expected 1 to 64, got {page_tokens}")
    return build_fingerprint(
        load_config(folder),
        weights_digest(folder),
        choose_device(device)[1],
        page_tokens,
        tenant=tenant,
        cache_salt=cache_salt,
    )


def _ids(folder: Path, prompt: str | None, tokens: str | None, chat: bool) -> list[int]:
    """Token ids of a prompt as the engine would encode it, or as they are given."""
    if prompt is not None:
        from tierkv.engine.serve.chat import ChatTemplate
        from tierkv.engine.serve.tokenizer import Tokenizer

        text = read_prompt(prompt)
        if chat:
            text = ChatTemplate.from_folder(folder).render([{"role": "user", "content": text}])
        return Tokenizer.from_folder(folder).encode(text, add_special_tokens=not chat)
    text = read_prompt(tokens or "")
    parts = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    for part in parts:
        if not part.isascii() or not part.isdigit() or len(part) > 10:
            raise ConfigError(f"--tokens: expected token ids such as 1,2,3, got {part[:20]!r}")
    return [int(part) for part in parts]


def examine(where: Endpoint, question: Question) -> Explanation:
    """Ask the daemon about one prompt. Raises TierIOError when it is away."""
    from tierkv.storage.identity import namespace, page_keys
    from tierkv.storage.types import pack_tokens

    ours = question.fingerprint
    step = ours.page_tokens
    try:
        keys = page_keys(namespace(ours), pack_tokens(question.tokens), step)
    except ValueError as error:
        raise ConfigError(f"--tokens: {error}") from None
    found = Explanation(namespace(ours).hex(), step, len(question.tokens), len(keys))
    if question.against is not None:
        found.against = _compare(question.tokens, question.against, step)
    with DaemonSocket(where.socket) as daemon:
        rows = daemon.namespaces()
    row = _row_of(ours, rows)
    found.held = row is not None
    if row is None:
        found.differences = _differences(ours, rows)
    elif keys:
        _look(where, int(row["page_bytes"]), keys, found)
    return found


def _row_of(ours: Fingerprint, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Pages of every salt are filed under the namespace without one."""
    from tierkv.storage.identity import namespace

    wanted = {namespace(ours), namespace(dataclasses.replace(ours, cache_salt=""))}
    return next((row for row in rows if bytes(row["namespace"]) in wanted), None)


def _differences(ours: Fingerprint, rows: list[dict[str, Any]]) -> list[Difference]:
    from tierkv.storage.identity import explain as explain_fields
    from tierkv.storage.identity import from_json

    found = []
    for row in rows:
        digest = bytes(row["namespace"]).hex()
        if not row["fingerprint"]:
            continue
        try:
            fields = [str(each) for each in explain_fields(ours, from_json(row["fingerprint"]))]
        except ConfigError as error:
            # Another version's fingerprint is a difference too, and all that can be said of it.
            fields = [str(error)]
        found.append(Difference(digest, model_of(row["fingerprint"]), fields))
    return sorted(found, key=lambda each: len(each.fields))


def _look(where: Endpoint, page_bytes: int, keys: list[PageKey], found: Explanation) -> None:
    with DaemonSocket(where.socket, page_bytes) as daemon:
        tiers = daemon.lookup(keys)
    found.hit_pages = next((i for i, tier in enumerate(tiers) if tier is None), len(tiers))
    found.hit_tiers = dict(Counter(tier for tier in tiers[: found.hit_pages] if tier))
    found.stranded_pages = sum(tier is not None for tier in tiers[found.hit_pages :])
    if found.hit_pages < len(keys):
        _ask_evictions(where, keys[found.hit_pages], found)


def _ask_evictions(where: Endpoint, key: PageKey, found: Explanation) -> None:
    """When and why a page left each tier lately. The explanation stands without it."""
    if where.url is None:
        found.evictions_unknown = "the daemon's HTTP is off"
        return
    try:
        answer = http_json(where, f"{EVICTIONS_PATH}?key={key.hex()}")
    except TierKVError as error:
        found.evictions_unknown = str(error)
        return
    if isinstance(answer, dict) and isinstance(answer.get("evictions"), list):
        found.evictions = answer["evictions"]
    else:
        found.evictions_unknown = "this daemon does not tell"


def _compare(ours: Sequence[int], other: Sequence[int], step: int) -> dict[str, int | None]:
    """The first token in which two prompts differ, and the pages they can share."""
    shortest = min(len(ours), len(other))
    first = next((i for i in range(shortest) if ours[i] != other[i]), shortest)
    differs = first < max(len(ours), len(other))
    return {
        "tokens": len(other),
        "first_different_token": first if differs else None,
        "ours": ours[first] if first < len(ours) else None,
        "other": other[first] if first < len(other) else None,
        "shared_pages": first // step,
    }


def _show(found: Explanation) -> None:
    write_line(
        f"namespace {found.namespace[:DIGITS]}, {found.tokens:,} tokens, {found.pages:,} pages"
    )
    if not found.held:
        write_line(
            "miss: the daemon has no such namespace" + ("" if found.differences else " at all")
        )
        table = new_table("other namespaces", "namespace", "model", "differs in: ours / theirs")
        for column in table.columns:
            column.justify = "left"
        for each in found.differences:
            table.add_row(each.namespace[:DIGITS], each.model, "\n".join(each.fields))
        if found.differences:
            write_table(table)
    elif not found.pages:
        write_line(f"miss: shorter than one page of {found.page_tokens} tokens; nothing is kept")
    else:
        _show_hit(found)
    if found.against is not None:
        _show_against(found.against)


def _show_hit(found: Explanation) -> None:
    tiers = ", ".join(f"{count:,} in {tier}" for tier, count in found.hit_tiers.items())
    if found.hit_pages == found.pages:
        rest = found.tokens - found.hit_tokens
        write_line(
            f"hit: all {found.pages:,} pages ({tiers}); {rest} tokens after them fill no page"
        )
        return
    if found.hit_pages:
        write_line(f"hit: the first {found.hit_tokens:,} tokens ({tiers})")
    else:
        write_line("miss: the daemon knows the namespace, but not this prompt's first page")
    end = found.hit_tokens + found.page_tokens
    write_line(
        f"first missing page: number {found.hit_pages}, tokens {found.hit_tokens} to {end - 1}"
    )
    for each in found.evictions or ():
        write_line(
            f"  left {each.get('tier')} at {_moment(each.get('wall_s'))}: {each.get('reason')}"
        )
    if found.evictions_unknown is not None:
        write_line(f"  whether it was evicted is not known: {found.evictions_unknown}")
    elif not found.evictions:
        write_line("  never committed, or evicted longer ago than the daemon remembers")
    if found.stranded_pages:
        write_line(f"  {found.stranded_pages:,} pages after it are there, of no use without it")


def _moment(wall_s: object) -> str:
    if not isinstance(wall_s, (int, float)):
        return "an unknown time"
    return datetime.fromtimestamp(wall_s).astimezone().isoformat(" ", "seconds")


def _show_against(against: dict[str, int | None]) -> None:
    first = against["first_different_token"]
    if first is None:
        write_line("the other prompt has the same tokens")
        return
    names = [
        "its end" if token is None else f"token {token}"
        for token in (against["ours"], against["other"])
    ]
    write_line(
        f"the other prompt differs from token {first} on: {names[0]} here, {names[1]} there; "
        f"{against['shared_pages']} pages are the same"
    )
