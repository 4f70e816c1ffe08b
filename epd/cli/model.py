"""``epd model``: model folders on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from epd.model_fetch import CATALOGUE, DOWNLOAD_TIMEOUT_S, fetch

app = typer.Typer(help="Model folders on this machine.", no_args_is_help=True)


@app.callback()
def model() -> None:
    """Model folders on this machine."""


@app.command("fetch")
def fetch_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(sorted(CATALOGUE))}.")],
    to: Annotated[
        Path | None,
        typer.Option(help="Folder to make; default below ~/.cache/epd/models."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(help="Limit of the download, seconds.")
    ] = DOWNLOAD_TIMEOUT_S,
) -> None:
    """Downloads a small open model as a plain Hugging Face folder and prints where it is."""
    typer.echo(fetch(name, to, timeout_s))
