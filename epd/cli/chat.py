"""``epd chat``: one question, the answer streamed to the terminal."""

import asyncio
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from epd.cli.connection import (
    ApiKey,
    Insecure,
    Tls,
    TlsCa,
    TlsCertificate,
    TlsKey,
    TlsServerName,
    client_tls,
)
from epd.client import Completion, EpdClient, Sampling
from epd.config import ConfigError
from epd.fleet.state import StateFolder


def chat(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    image: Annotated[
        list[Path] | None, typer.Option(help="Image file; may be given several times.")
    ] = None,
    router: Annotated[str, typer.Option(help="host:port of the router [EPD_ROUTER].")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes a draw repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Deadline in seconds.")] = 600.0,
    show_timings: Annotated[bool, typer.Option(help="Show where the time went.")] = False,
    api_key: ApiKey = "",
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_server_name: TlsServerName = "",
    insecure: Insecure = False,
) -> None:
    """Asks a question about images or text and streams the answer."""
    images = image or []
    missing = [str(path) for path in images if not path.is_file()]
    if missing:
        raise ConfigError(f"no such image: {', '.join(missing)}")
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    connection = client_tls(tls, tls_ca, tls_certificate, tls_key, tls_server_name, insecure)
    address = StateFolder().router_address(router)
    client = functools.partial(
        EpdClient, address, timeout_s=timeout_s, api_key=api_key, tls=connection
    )
    try:
        completion = asyncio.run(_ask(client, question, images, sampling, tuple(stop or ())))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if show_timings:
        _print_timings(completion)


async def _ask(
    connect: Callable[[], EpdClient],
    question: str,
    images: list[Path],
    sampling: Sampling,
    stop: tuple[str, ...],
) -> Completion:
    async with connect() as client:
        stream = client.generate(question, images=images, sampling=sampling, stop=stop)
        try:
            async for delta in stream:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        finally:
            sys.stdout.write("\n")
        return stream.completion


def _print_timings(completion: Completion) -> None:
    usage = completion.usage
    print(
        f"{usage.prompt_tokens} prompt tokens ({usage.image_tokens} of images, "
        f"{usage.cached_tokens} cached), {usage.completion_tokens} answer tokens, "
        f"first after {completion.ttft_ns / 1e6:.1f} ms, request {completion.request_id}",
        file=sys.stderr,
    )
    for stage, duration_ns in completion.timings_ns.items():
        print(f"  {stage:24} {duration_ns / 1e6:9.2f} ms", file=sys.stderr)
