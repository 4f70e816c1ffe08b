"""``epd up``: the fleet on this machine."""

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from epd.cli.model_folder import DEFAULT_MODEL, check_model_folder
from epd.cli.running_fleet import OTLP_VARIABLE, running_fleet, sigterm_interrupts
from epd.cli.terminal import make_console
from epd.config import ConfigError
from epd.fleet.fleet import Fleet
from epd.fleet.plan import FleetPlan
from epd.fleet.state import StateFolder

CHECK_PERIOD_S = 0.2


def up(
    model: Annotated[Path, typer.Option(help="Model folder.")] = DEFAULT_MODEL,
    encoders: Annotated[int, typer.Option(min=0, help="Encoder processes.")] = 1,
    prefills: Annotated[int, typer.Option(min=0, help="Prefill processes.")] = 1,
    decodes: Annotated[int, typer.Option(min=0, help="Decode processes.")] = 1,
    unified: Annotated[int, typer.Option(min=0, help="Processes that serve requests alone.")] = 0,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the router.")] = 50050,
    http_port: Annotated[
        int, typer.Option(min=-1, max=65535, help="Port of the OpenAI-compatible HTTP, -1: off.")
    ] = 8000,
) -> None:
    """Runs the services on this machine until Ctrl-C and prints their addresses."""
    try:
        plan = FleetPlan(
            check_model_folder(model),
            encoders,
            prefills,
            decodes,
            unified,
            router_port=port,
            http_port=http_port,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    state = StateFolder()
    console = make_console()
    with sigterm_interrupts(), contextlib.suppress(KeyboardInterrupt):
        console.print(f"starting {plan.process_count} processes …")
        with running_fleet(plan, state, state.traces) as fleet:
            console.print(_addresses(fleet))
            console.print(
                f"router at [bold]{fleet.router_address}[/bold]{_http(fleet)}; "
                f"logs in {state.logs}; "
                f"traces {_where_traces_go()}; Ctrl-C stops"
            )
            while True:
                fleet.check()
                time.sleep(CHECK_PERIOD_S)


def _where_traces_go() -> str:
    own = os.environ.get(OTLP_VARIABLE)
    return f"go to {own}" if own else "are shown by `epd trace`"


def _http(fleet: Fleet) -> str:
    url = f"http://{fleet.http_address}/v1"
    return f", OpenAI API at [bold]{url}[/bold]" if fleet.http_address else ""


def _addresses(fleet: Fleet) -> Table:
    table = Table()
    for column in ("process", "address", "metrics", "pid"):
        table.add_column(column)
    for process in fleet.processes.values():
        table.add_row(process.name, process.address, process.metrics_address, str(process.pid))
    return table
