"""``epd trace``: a request's way through the services."""

from typing import Annotated

import typer

from epd.cli.terminal import make_console
from epd.config import ConfigError
from epd.fleet.state import StateFolder
from epd.telemetry.waterfall import Waterfall


def trace(
    trace_id: Annotated[
        str, typer.Argument(help="Id of the trace or its beginning; the latest when left out.")
    ] = "",
) -> None:
    """Shows the waterfall of a request that a fleet of this machine has served."""
    traces = StateFolder().traces
    known = [found for found in traces.trace_ids() if found.startswith(trace_id.lower())]
    if not known:
        wanted = f"no trace {trace_id} is kept" if trace_id else "no trace is kept yet"
        raise ConfigError(f"{wanted}; `epd up` keeps those of its requests")
    if trace_id and len(known) > 1:
        raise ConfigError(f"{len(known)} traces begin with {trace_id}")
    make_console().print(Waterfall(traces.spans(known[-1])))
