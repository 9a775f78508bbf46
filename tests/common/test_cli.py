"""What all scripts print: the command to repeat, errors of one line."""

import io
import re
import shlex
import sys

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from common import cli


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


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_shows_the_bar_the_steps_and_the_time_left_before_the_text(width, monkeypatch):
    seen = io.StringIO()
    monkeypatch.setattr(cli, "console", Console(file=seen, width=width, force_terminal=True, soft_wrap=True))
    with cli.progress(1000, 3, "epoch ") as advance:
        advance("accuracy 0.6200 " + "and much more " * 20, 1)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", seen.getvalue()))
    assert all(len(line) <= width for line in lines)
    assert re.match(r"━+ epoch 4 of 1000, \S+ left; accuracy", lines[-2])
