"""Write results/CLAIMS.md: each claim of the paper, ours, and a verdict; from recorded CSVs, without a GPU.

    python scripts/claims.py [--results DIR]

Exit status: 0, or 2 if a CSV could not be read.
"""

from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import typer
from rich.text import Text

from bench.cli import console, user_errors
from bench.places import check_place, write_whole
from report.claims.evidence import Evidence
from report.claims.page import claims_page
from report.frames import recorded

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    results: Annotated[Path, typer.Option(help="Folder of the CSVs; CLAIMS.md is written into it.")] = Path("results"),
) -> None:
    """Write the page of the paper's claims."""
    with user_errors():
        if not results.is_dir():
            raise ValueError(f"--results: got {results}, which is no folder; name one that holds recorded CSVs")
        path = results / "CLAIMS.md"
        check_place("--results", path)
        write_whole(path, claims_page(Evidence.of(results, recorded(results))))
        console.print(Text(f"drawn      {path}"))


if __name__ == "__main__":
    app()
