"""What all scripts print: the command to repeat, tables in logs, errors of one line."""

import io
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from bench import cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("which", "executable", "expected"),
    [
        ("{here}/.venv/bin/python", "{here}/.venv/bin/python", "python"),  # an environment is activated
        ("/usr/bin/python", "{here}/.venv/bin/python", ".venv/bin/python"),
        (None, "/opt/env/bin/python3", "/opt/env/bin/python3"),
        (None, "/opt/my env/bin/python3", "'/opt/my env/bin/python3'"),
    ],
)
def test_the_command_to_repeat_can_be_pasted(tmp_path, monkeypatch, which, executable, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", executable.format(here=tmp_path))
    monkeypatch.setattr(sys, "argv", ["scripts/x.py", "--set", "data.names=[cora, 'my graph']", "--again"])
    monkeypatch.setattr(cli.shutil, "which", lambda name: which and which.format(here=tmp_path))
    command = cli.repeat_command()
    assert command.startswith(f"{expected} scripts/x.py ")
    assert shlex.split(command)[1:] == sys.argv


def test_a_run_on_ranks_is_repeated_by_torchrun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/.venv/bin/python")
    monkeypatch.setattr(sys, "argv", ["scripts/x.py"])
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cli.repeat_command() == ".venv/bin/torchrun --nproc-per-node 2 scripts/x.py"
    monkeypatch.setattr(cli.shutil, "which", lambda name: f"{tmp_path}/.venv/bin/{name}")
    assert cli.repeat_command() == "torchrun --nproc-per-node 2 scripts/x.py"


def test_a_table_in_a_log_is_as_wide_as_it_needs(tmp_path):
    code = (
        "from rich.table import Table; from bench.cli import console\n"
        "table = Table(*(f'column {n}' for n in range(20)))\n"
        "table.add_row(*(f'a long cell {n}' for n in range(20)))\n"
        "console.print(table)\n"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}  # without COLUMNS
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "a long cell 19" in done.stdout
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) < cli.WIDE


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


def test_the_end_names_the_file_and_every_problem(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(cli, "console", Console(file=out, soft_wrap=True))
    monkeypatch.setattr(cli, "errors", Console(file=err, soft_wrap=True))
    cli.print_end("3 rows", Path("results/[x].csv"), ["cora: not there", "[bold]: odd name"])
    assert "results      3 rows in results/[x].csv\n" in out.getvalue()
    assert "to repeat    " in out.getvalue()
    assert err.getvalue().splitlines() == ["error: cora: not there", "error: [bold]: odd name"]
