"""Ctrl-C in each script: one line that says what was kept, status 130, no traceback, whenever it comes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench import cli, runner
from bench.records import read_rows

ROOT = Path(__file__).resolve().parents[2]
# All scripts but the two modules that the others import.
SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if path.stem not in ("clone", "interrupts"))


def start(script: str, *arguments: object, options: tuple[str, ...] = ()) -> subprocess.Popen:
    """A script that gets Ctrl-C as from a terminal, also where this process runs in the background."""
    return subprocess.Popen(
        [sys.executable, *options, f"scripts/{script}.py", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_during_the_imports(script):
    """Within the first second: while the packages are imported, of which -X importtime tells."""
    process = start(script, "--help", options=("-X", "importtime"))
    for line in process.stderr:
        if line.endswith(" interrupts\n"):
            break
    process.send_signal(signal.SIGINT)
    rest = [line for line in process.stderr.read().splitlines() if not line.startswith("import time:")]
    process.stdout.read()
    assert process.wait(60) == 130
    assert rest == ["interrupted: what was written before is kept"]


def test_during_a_measurement_the_rows_before_are_kept(tmp_path):
    path = tmp_path / "r.csv"
    process = start("stability", "--results", path)
    while not path.exists() or path.stat().st_size == 0:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=120)
    assert process.returncode == 130
    lines = [line for line in text.splitlines() if not line.startswith("warning: ")]
    assert lines == [f"interrupted: rows of what was finished are in {path}; the same command measures the rest"]
    assert read_rows(path)


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        (cli.user_errors, "interrupted: what was written before is kept"),
        (lambda: cli.user_errors(kept=lambda: "two files are kept"), "interrupted: two files are kept"),
        (lambda: runner.user_errors(Path("nowhere.csv")), "interrupted: nothing was written"),
    ],
)
def test_inside_the_work(guard, expected):
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def main() -> None:
        with guard():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)

    before = signal.getsignal(signal.SIGINT)
    done = CliRunner().invoke(app)
    assert (done.exit_code, done.stderr.strip(), done.stdout) == (130, expected, "")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_background_job_goes_on(monkeypatch):
    """A shell without job control starts it with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with cli.user_errors():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_importing_a_script_leaves_ctrl_c_alone():
    """The tests import scripts; Ctrl-C has to end pytest with its summary."""
    code = "import signal, sys; sys.path.insert(0, 'scripts'); import interrupts; print(signal.getsignal(2).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "default_int_handler"


def test_reproduce_figures_waits_until_the_interrupted_step_has_ended(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "slow.py").write_text(
        "import pathlib, time\n"
        "try:\n"
        "    pathlib.Path('started').touch()\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(1)\n"  # as a training run that saves its state
        "    pathlib.Path('ended').touch()\n"
    )
    code = (
        "import sys, pathlib; sys.path.insert(0, 'scripts'); import reproduce_figures as script\n"
        "script.ROOT = pathlib.Path(sys.argv[1])\n"
        "try:\n"
        "    script.run('slow.py')\n"
        "except KeyboardInterrupt:\n"
        "    print('ended' if (script.ROOT / 'ended').exists() else 'killed')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        start_new_session=True,  # a process group of its own, all of which a terminal interrupts
        stdout=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[0].splitlines()[-1] == "ended"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux only")
def test_the_processes_of_check_figures_end_with_it():
    process = start("check_figures", "--processes", 1)
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    children: list[str] = []
    while not any(map(draws, children)):
        assert process.poll() is None
        time.sleep(0.05)
        children = listed.read_text().split()
    time.sleep(1)
    process.send_signal(signal.SIGINT)  # to it alone: a terminal would interrupt the others, too
    _, text = process.communicate(timeout=20)
    assert (process.returncode, text) == (130, "interrupted: what was written before is kept\n")
    assert not any(map(draws, children))


def draws(pid: str) -> bool:
    """Whether a process is there and is one of multiprocessing's."""
    try:
        return "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
