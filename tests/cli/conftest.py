"""The command line as a function: arguments in; exit code, stdout and stderr out."""

from collections.abc import Callable

import pytest

from optimus_compiler.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def optimus(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; returns exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
