"""Entry point of the command `tierkv`: the commands, and how errors end the process.

Owns the exit codes: 0 done; 1 failed; 2 the user must change something (wrong usage and
ConfigError with its kinds); 130 interrupted. An error is one line on standard error, never a
traceback. Importing this module loads neither torch nor the engine: every command imports what it
needs when it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tierkv import __version__
from tierkv.cli import config_command, daemon, pool
from tierkv.cli.bench import bench
from tierkv.cli.console import configure_logging, write_json, write_line, write_note
from tierkv.cli.demo import demo
from tierkv.cli.drain import drain
from tierkv.cli.drop import drop
from tierkv.cli.explain import explain
from tierkv.cli.fsck import fsck
from tierkv.cli.generate import generate
from tierkv.cli.ls import ls
from tierkv.cli.plan import plan
from tierkv.cli.serve import serve
from tierkv.cli.stat import stat
from tierkv.cli.top import top
from tierkv.storage.errors import ConfigError, TierKVError

EXIT_FAILED = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 130

ENGINE_PACKAGES = frozenset(
    ("aiohttp", "gguf", "jinja2", "prometheus_client", "safetensors", "tokenizers", "torch")
)
"""What the extra `engine` installs."""

# Typer brings its own copy of click in some versions and uses the installed one in others; the
# base of all usage errors is the same class only when it is reached from here.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="tierkv",
    help="A tiered store that keeps LLM attention KV cache alive outside the GPU.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
engine_app = typer.Typer(help="The inference engine.", rich_markup_mode=None)
config_app = typer.Typer(help="The daemon's configuration.", rich_markup_mode=None)
pool_app = typer.Typer(help="The pool of nodes.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what happens, on standard error.")
    ] = False,
) -> None:
    configure_logging(verbose)
    if context.invoked_subcommand is None:
        write_line(context.get_help())


@engine_app.callback(invoke_without_command=True)
@config_app.callback(invoke_without_command=True)
@pool_app.callback(invoke_without_command=True)
def _group(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        write_line(context.get_help())


@app.command()
def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the version."""
    if as_json:
        write_json({"version": __version__})
    else:
        write_line(f"tierkv {__version__}")


app.command()(demo)
app.command()(generate)
app.command()(stat)
app.command()(bench)
app.command()(plan)
engine_app.command()(serve)
app.add_typer(engine_app, name="engine")
app.command()(daemon.serve)
for command in (top, ls, drop, drain, fsck, explain):
    app.command()(command)
config_app.command()(config_command.show)
config_app.command()(config_command.check)
app.add_typer(config_app, name="config")
pool_app.command()(pool.status)
app.add_typer(pool_app, name="pool")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. `arguments` are the process's own when None."""
    try:
        code = app(None if arguments is None else list(arguments), standalone_mode=False)
    except TierKVError as error:
        return _fail(str(error), EXIT_USER if isinstance(error, ConfigError) else EXIT_FAILED)
    except _UsageError as error:
        # str() of a usage error lacks the option's name.
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        return _fail(f"{message.rstrip('.')}; see tierkv --help", EXIT_USER)
    except ModuleNotFoundError as error:
        if error.name not in ENGINE_PACKAGES:
            raise
        return _fail(
            f"package {error.name} is not installed; run: pip install 'tierkv[engine]'", EXIT_USER
        )
    except BrokenPipeError:
        # The reader went away, as `head` does. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        place = f" {error.filename}" if error.filename else ""
        return _fail(f"{error.strerror or error}{place}", EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    write_note("tierkv: error: " + " ".join(message.split()))
    return code


def run() -> None:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    run()
