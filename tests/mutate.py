"""Mutation test of the fused kernels and their formats: random one-line faults, each run against the tests of a CPU.

    python tests/mutate.py --count 120 --seed 0 --processes 2 --out mutants.csv [--files FILE ...]

A mutant is one token changed on one line (or one statement removed) of TARGETS, in a copy of the clone. It is
    invalid    it does not compile, or not import
    killed     a test fails
    survived   all tests pass: either the mutant is equivalent, or the suite has a hole
The exit status is 0 whatever the outcome; the survivors are printed with their lines.
"""

import argparse
import csv
import random
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
ON_CPU = "tests/kernels/test_cuda_on_cpu.py"
EDGES, EDGES_BACKWARD = (f"tests/kernels/test_edge_{name}_on_cpu.py" for name in ("kernel", "backward"))
BACKWARD = "tests/kernels/test_backward_tiles_on_cpu.py"
FEATURES = "tests/kernels/test_feature_products_on_cpu.py"
PAPER = "tests/baselines/test_cuda_on_cpu_baselines.py"
DENSE, DENSE_TRAINING = (f"tests/dense/test_dense_block_{name}.py" for name in ("on_cpu", "training_on_cpu"))
PLANS = (
    *(f"tests/kernels/test_gpu_{name}_on_cpu.py" for name in ("plan", "planning")),
    "tests/kernels/test_plan_room.py",
)
SUITES = {  # by the start of a file's name; the first that fits
    "dense/cuda/dense_block_backward": (DENSE_TRAINING,),
    "dense/cuda/dense_": (DENSE, DENSE_TRAINING),
    "baselines/cuda/fused3s_paper.cu": (PAPER,),
    "parallel/cuda/rank_rows.cu": ("tests/parallel/test_rank_rows.py",),
    "kernels/plan_room.py": ("tests/kernels/test_plan_room.py",),
    "kernels/formats/gpu_": PLANS,
    "kernels/formats/": ("tests/kernels/formats", "tests/kernels/test_graph_forms.py", ON_CPU),
    "kernels/cuda/plan_": PLANS,
    "kernels/cuda/thread_group": PLANS,
    "kernels/cuda/fused3s_backward": (BACKWARD,),
    "kernels/cuda/fused3s_edges_backward": (EDGES_BACKWARD,),
    "kernels/cuda/fused3s_edges.cu": (EDGES, EDGES_BACKWARD),
    "kernels/cuda/feature_products": (FEATURES, EDGES_BACKWARD),
    "kernels/cuda/additive_score": ("tests/kernels/test_score_terms.py",),
    "kernels/cuda/gradient_window": (BACKWARD,),
    "kernels/cuda/pair_gather": (BACKWARD,),
    "kernels/cuda/sum_splits": (BACKWARD,),
    "kernels/cuda/lane_group": (EDGES, EDGES_BACKWARD),
    "kernels/cuda/score_terms": (EDGES, EDGES_BACKWARD, "tests/kernels/test_score_terms.py"),
    "kernels/cuda/split_kv": (ON_CPU, PAPER),
    "kernels/cuda/tile_": ("tests/kernels/test_tile_features_on_cpu.py", EDGES, ON_CPU),
    "kernels/cuda/weight_gradient": (FEATURES,),
    "kernels/cuda/": (ON_CPU, EDGES, BACKWARD),
}
FOLDERS = ("dense/cuda/*.cu*", "baselines/cuda/fused3s_paper.cu", "parallel/cuda/*.cu", "kernels/cuda/*.cu*")
TARGETS = tuple(
    sorted(
        str(path.relative_to(ROOT))
        for pattern in (*FOLDERS, "kernels/plan_room.py", "kernels/formats/*.py")
        for path in ROOT.glob(pattern)
        if path.name not in ("__init__.py", "residual_norm.cu")
    )
)
COPIED = (
    "kernels",
    "baselines",
    "bench",
    "configs",
    "data",
    "dense",
    "inference",
    "models",
    "parallel",
    "tests",
    "training",
)
COPIED += ("scripts", "pyproject.toml")
INVALID = ("does not compile", "SyntaxError", "IndentationError", "ModuleNotFoundError")
TIMEOUT_S = 600  # a mutant that makes a loop endless is killed by it

# One match of a token is replaced by one of its replacements. Operators stand between spaces.
NUMBER = re.compile(r"(?<![\w.\"'<])\d+(?![\w.\"'])")
OPERATORS = {"+": ["-"], "-": ["+"], "*": ["+"], "/": ["*"], "//": ["*"], "%": ["*"], "<<": [">>"], ">>": ["<<"]}
OPERATORS |= {"<": ["<=", ">"], ">": [">=", "<"], "<=": ["<", ">"], ">=": [">", "<"], "==": ["!="], "!=": ["=="]}
OPERATORS |= {"&&": ["||"], "||": ["&&"], "^": ["|", "+"], "&": ["|"], "|": ["&"], "+=": ["-=", "="], "*=": ["="]}
WORDS = {r"fmaxf\b": "fminf", r"min(?=\()": "max", r"max(?=\()": "min", r"true\b": "false", r"false\b": "true"}
SWAPS = [(re.compile(rf"(?<=\s){re.escape(token)}(?=\s)"), swaps) for token, swaps in OPERATORS.items()]
SWAPS += [(re.compile(rf"\b{word}"), [swap]) for word, swap in (WORDS | {r"True\b": "False"}).items()]
DECLARATION = r"(?:return|using|constexpr|static_assert|const|struct|int|float|u32|i64)\b"
STATEMENT = re.compile(rf"^\s*(?!{DECLARATION})[\w:>.\[\]()-]+.*;\s*$")


@dataclass(frozen=True)
class Mutant:
    """A change of one line."""

    file: str
    line: int
    before: str
    after: str
    outcome: str = ""
    killed_by: str = ""


def code_lines(path: Path) -> list[tuple[int, str]]:
    """(line number from 1, text) of the lines with code: no comments, docstrings, includes, imports or assertions."""
    lines, in_docstring = [], False
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        quotes = text.count('"""')
        if in_docstring or quotes:
            in_docstring ^= quotes % 2 == 1
            continue
        stripped = text.strip()
        if not stripped or stripped.startswith(("//", "#", "import ", "from ", "static_assert", "raise ", 'f"', "@")):
            continue
        lines.append((number, text))
    return lines


def mutants_of(file: str) -> list[Mutant]:
    """All mutants of a file."""
    found = []
    comment = "#" if file.endswith(".py") else "//"
    for number, text in code_lines(ROOT / file):
        code = text.split(f"  {comment}")[0]
        changed = set()
        for pattern, replacements in SWAPS:
            for match in pattern.finditer(code):
                changed |= {code[: match.start()] + new + code[match.end() :] for new in replacements}
        for match in NUMBER.finditer(code):
            for value in (int(match[0]) + 1, int(match[0]) - 1):
                changed.add(code[: match.start()] + str(value) + code[match.end() :])
        if not file.endswith(".py") and STATEMENT.match(code):
            changed.add("")
        found += [Mutant(file, number, text, after) for after in sorted(changed)]
    return found


def run(mutant: Mutant, copy: Path) -> Mutant:
    """The mutant with its outcome; `copy` is a copy of the clone and is left as it was."""
    path = copy / mutant.file
    original = path.read_text(encoding="utf-8")
    lines = original.split("\n")
    lines[mutant.line - 1] = mutant.after
    path.write_text("\n".join(lines), encoding="utf-8")
    suite = next(suite for start, suite in SUITES.items() if mutant.file.startswith(start))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *suite]
    try:
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=TIMEOUT_S)
        output, failed = done.stdout + done.stderr, done.returncode != 0
    except subprocess.TimeoutExpired:
        output, failed = "FAILED timeout", True
    finally:
        path.write_text(original, encoding="utf-8")
    killed_by = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")[:200]
    outcome = "survived" if not failed else "invalid" if any(text in output for text in INVALID) else "killed"
    return Mutant(mutant.file, mutant.line, mutant.before.strip(), mutant.after.strip(), outcome, killed_by)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--files", nargs="+", choices=TARGETS, default=TARGETS, metavar="FILE")
    parser.add_argument("--out", type=Path, default=Path("mutants.csv"))
    arguments = parser.parse_args()
    # Files weigh by their lines of code, lines of a file alike: a line with many operators is no likelier than others.
    randomness = random.Random(arguments.seed)
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for file in arguments.files:
        for mutant in mutants_of(file):
            by_line.setdefault((mutant.file, mutant.line), []).append(mutant)
    lines = randomness.sample(sorted(by_line), min(arguments.count, len(by_line)))
    chosen = [randomness.choice(by_line[line]) for line in lines]

    with tempfile.TemporaryDirectory() as folder, arguments.out.open("w", newline="", encoding="utf-8") as file:
        copies: SimpleQueue[Path] = SimpleQueue()
        for process in range(arguments.processes):
            copy = Path(folder) / str(process)
            copy.mkdir()
            for name in COPIED:
                source = ROOT / name
                (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
            copies.put(copy)

        def next_run(mutant: Mutant) -> Mutant:
            copy = copies.get()
            try:
                return run(mutant, copy)
            finally:
                copies.put(copy)

        writer = csv.DictWriter(file, ["file", "line", "before", "after", "outcome", "killed_by"])
        writer.writeheader()
        outcomes: dict[str, int] = {}
        with ThreadPoolExecutor(arguments.processes) as pool:
            for result in pool.map(next_run, chosen):
                writer.writerow(asdict(result))
                file.flush()
                outcomes[result.outcome] = outcomes.get(result.outcome, 0) + 1
                if result.outcome == "survived":
                    print(f"{result.file}:{result.line}\n  - {result.before}\n  + {result.after}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))


if __name__ == "__main__":
    main()
