"""``epd trace``: a request's way through the services."""

import io
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from epd.cli.terminal import PLAIN_WIDTH, make_console
from epd.config import ConfigError
from epd.fleet.state import StateFolder
from epd.telemetry.waterfall import Waterfall


def trace(
    trace_id: Annotated[
        str, typer.Argument(help="Id of the trace or its beginning; the latest when left out.")
    ] = "",
    svg: Annotated[
        Path | None, typer.Option(help="Write the picture to this file instead.")
    ] = None,
) -> None:
    """Shows the waterfall of a request that a fleet of this machine has served."""
    traces = StateFolder().traces
    known = [found for found in traces.trace_ids() if found.startswith(trace_id.lower())]
    if not known:
        wanted = f"no trace {trace_id} is kept" if trace_id else "no trace is kept yet"
        raise ConfigError(f"{wanted}; `epd up` keeps those of its requests")
    if trace_id and len(known) > 1:
        raise ConfigError(f"{len(known)} traces begin with {trace_id}")
    waterfall = Waterfall(traces.spans(known[-1]))
    if svg is None:
        make_console().print(waterfall)
        return
    console = Console(width=PLAIN_WIDTH, record=True, file=io.StringIO())
    console.print(waterfall)
    console.save_svg(str(svg), title="epd trace")
