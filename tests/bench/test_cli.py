"""What all scripts print: the command to repeat, errors of one line."""

import shlex
import sys

import pytest
import typer
from typer.testing import CliRunner

from bench import cli


def test_the_command_to_repeat_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/.venv/bin/python")
    monkeypatch.setattr(sys, "argv", ["scripts/x.py", "--set", "data.names=[cora, 'my graph']", "--again"])
    assert cli.repeat_command().startswith(".venv/bin/python scripts/x.py ")
    assert shlex.split(cli.repeat_command())[1:] == sys.argv
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cli.repeat_command().startswith(".venv/bin/torchrun --nproc-per-node 2 scripts/x.py ")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("data.x = 3: allowed are 1, 2"), 2, "error: data.x = 3: allowed are 1, 2"),
        (ValueError("[red]not markup[/red] [/]"), 2, "error: [red]not markup[/red] [/]"),
        (OSError(28, "No space left on device", "r.csv"), 2, "error: [Errno 28] No space left on device: 'r.csv'"),
        (MemoryError("out of memory while x: y"), 2, "error: out of memory while x: y"),
        (KeyboardInterrupt(), 130, "interrupted: what was written before is kept"),
    ],
)
def test_an_error_of_the_user_is_a_line_and_a_status(error, status, text):
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def main() -> None:
        with cli.user_errors():
            raise error

    done = CliRunner().invoke(app)
    assert (done.exit_code, done.stderr.strip(), done.stdout) == (status, text, "")


def test_a_bug_keeps_its_traceback():
    with pytest.raises(KeyError), cli.user_errors():
        raise KeyError("a bug")
