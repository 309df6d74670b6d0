"""The entry point `optimus`: the list of commands, and how their errors are shown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from optimus_compiler.cli import checkpoint
from optimus_compiler.cli.demo import demo
from optimus_compiler.cli.doctor import doctor
from optimus_compiler.cli.evaluate import evaluate
from optimus_compiler.cli.explain import explain
from optimus_compiler.cli.export import export
from optimus_compiler.cli.import_optimus_data import import_optimus_data
from optimus_compiler.cli.launch import launch
from optimus_compiler.cli.plan import plan
from optimus_compiler.cli.plot import plot
from optimus_compiler.cli.prepare import prepare
from optimus_compiler.cli.pretrain import pretrain
from optimus_compiler.cli.slot import slot
from optimus_compiler.cli.status import status

USER_ERROR, RUN_FAILED = 2, 1

app = typer.Typer(
    name="optimus",
    add_completion=False,
    rich_markup_mode=None,  # errors and help stay plain text, unwrapped where they are one line
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    prepare,
    import_optimus_data,
    pretrain,
    launch,
    status,
    export,
    evaluate,
    plan,
    explain,
    plot,
    doctor,
    demo,
):
    app.command()(command)
app.command(hidden=True)(slot)
app.add_typer(checkpoint.app, name="checkpoint")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"optimus-compiler {version('optimus-compiler')}")
        raise typer.Exit


@app.callback()
def optimus(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    """Compile a plain Hugging Face-style OLMoE into a fused training program, and pretrain it.

    \b
    Example:
      optimus demo
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a failed run, 2 for a mistake of the user, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        code = app(arguments or ["--help"], prog_name="optimus", standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if debug:
            raise
        return _report(error)
    if code == 130:
        print("optimus: interrupted", file=sys.stderr)
    return code or 0


def _report(error: Exception) -> int:
    """One unwrapped line on stderr; returns the exit code."""
    if hasattr(error, "format_message"):  # the command line itself: typer's usage errors, whichever click it carries
        message, code = error.format_message(), USER_ERROR
    elif isinstance(error, OSError):
        message, code = f"{error.filename}: {error.strerror}" if error.filename else str(error), USER_ERROR
    elif isinstance(error, ValueError):
        message, code = str(error), USER_ERROR
    else:
        message, code = str(error) or type(error).__name__, RUN_FAILED
    print(f"optimus: error: {' '.join(message.split())}", file=sys.stderr)
    return code
