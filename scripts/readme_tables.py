"""Renew the generated tables of the README from the recorded CSVs; needs no GPU.

    python scripts/readme_tables.py [--readme README.md] [--results DIR] [--output FILE] [--device NAME]

Tables stand between `<!-- begin generated: NAME -->` and `<!-- end generated: NAME -->`; report/readme has the names.
Exit status: 0, or 2 if a CSV or a marker cannot be read.
"""

from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import typer
from rich.text import Text

from bench.cli import console, user_errors
from bench.places import check_place, write_whole
from report.frames import recorded
from report.readme import fill, of_one_gpu, read

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    readme: Annotated[Path, typer.Option(help="File whose marked tables are computed.")] = Path("README.md"),
    results: Annotated[Path, typer.Option(help="Folder of the CSVs; its subfolders are read too.")] = Path("results"),
    output: Annotated[Path | None, typer.Option(help="File to write; the default is the file that was read.")] = None,
    device: Annotated[str | None, typer.Option(help="GPU of the rows, if several were recorded.")] = None,
) -> None:
    """Renew the generated tables of the README."""
    with user_errors():
        if output:
            check_place("--output", output)
        text = read(readme)
        renewed = fill(text, of_one_gpu(recorded(results), device))
        path = output or readme
        if not path.exists() or path.read_bytes() != renewed.encode():
            write_whole(path, renewed)
            console.print(Text(f"written    {path}"))
        else:
            console.print(Text(f"unchanged  {path}"))


if __name__ == "__main__":
    app()
