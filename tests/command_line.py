"""The command line for tests: ``run`` a command, or the one ``sentence`` of a command that must fail."""

from __future__ import annotations

from click.testing import CliRunner, Result

import flashsim.cli as cli


def run(*args: str) -> Result:
    return CliRunner().invoke(cli.main, list(args))


def sentence(*args: str) -> str:
    """Stderr of a command that must fail with exit code 2, one line and no traceback."""
    done = run(*args)
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr.strip()
