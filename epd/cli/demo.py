"""``epd demo``: a fleet starts, answers a question about a picture, shows its trace and stops."""

import asyncio
import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from epd.cli.model_folder import DEFAULT_MODEL, check_model_folder
from epd.cli.running_fleet import OTLP_VARIABLE, running_fleet, sigterm_interrupts
from epd.cli.terminal import make_console
from epd.client import EpdClient, Sampling
from epd.fleet.plan import FleetPlan
from epd.fleet.state import StateFolder
from epd.telemetry.received_span import ReceivedSpan
from epd.telemetry.span_store import SpanSink, SpanStore
from epd.telemetry.waterfall import Waterfall

ANSWER_TIMEOUT_S = 60.0


def demo(
    model: Annotated[Path, typer.Option(help="Model folder.")] = DEFAULT_MODEL,
    image: Annotated[
        Path | None, typer.Option(help="Picture to ask about; a sample of shapes when left out.")
    ] = None,
    question: Annotated[str, typer.Option(help="What to ask.")] = "describe the image.",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 64,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the router.")] = 50050,
) -> None:
    """Starts four processes, asks about a picture, shows the trace of the request, stops."""
    plan = FleetPlan(check_model_folder(model), router_port=port)
    picture = image.read_bytes() if image else sample_image()
    console = make_console()
    state, spans = StateFolder(), SpanStore()
    with sigterm_interrupts():
        console.print("starting router, encoder, prefill and decode …")
        with running_fleet(plan, state, _Both(spans, state.traces)) as fleet:
            console.print(f"[bold]{question}[/bold] ({image or 'sample picture'})")
            asyncio.run(_ask(fleet.router_address, question, picture, max_tokens))
        # Stopped: every service has sent its spans.
        if os.environ.get(OTLP_VARIABLE):
            console.print(f"the trace went to {os.environ[OTLP_VARIABLE]}")
        for trace_id in spans.trace_ids():
            console.print(Waterfall(spans.spans(trace_id)))


def sample_image() -> bytes:
    """A PNG of a red circle, a green triangle and a blue star."""
    return (resources.files("epd.cli") / "sample.png").read_bytes()


async def _ask(address: str, question: str, picture: bytes, max_tokens: int) -> None:
    async with EpdClient(address, timeout_s=ANSWER_TIMEOUT_S) as client:
        sampling = Sampling(max_tokens=max_tokens)
        async for delta in client.generate(question, images=[picture], sampling=sampling):
            print(delta.text, end="", flush=True)
    print()


class _Both:
    """Gives spans to two sinks."""

    def __init__(self, *sinks: SpanSink) -> None:
        self._sinks = sinks

    def add(self, spans: Iterable[ReceivedSpan]) -> None:
        """Keeps the spans twice."""
        kept = list(spans)
        for sink in self._sinks:
            sink.add(kept)
