"""``epd status``: services, health, models, queues, blocks."""

import asyncio
from dataclasses import dataclass
from typing import Annotated

import grpc
import typer
from rich.table import Table

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
from epd.cli.terminal import make_console
from epd.config import ConfigError
from epd.fleet.state import StateFolder
from epd.rpc.channels import open_channel
from epd.rpc.client_tls import ClientTls
from epd.rpc.roles import role_name
from epd.rpc.status import error_from_rpc
from epd.rpc.tls_config import ClientTlsConfig
from epd.v1 import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc

TIMEOUT_S = 3.0


@dataclass(frozen=True)
class WorkerReport:
    """A worker as the router sees it and as it tells itself; None where it did not answer."""

    seen: router_pb2.WorkerStatus
    info: worker_pb2.GetInfoResponse | None
    load: worker_pb2.WatchLoadResponse | None


def status(
    router: Annotated[str, typer.Option(help="host:port of the router [EPD_ROUTER].")] = "",
    api_key: ApiKey = "",
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_server_name: TlsServerName = "",
    insecure: Insecure = False,
) -> None:
    """Shows the services behind a router: health, models, queues, blocks, transport."""
    connection = client_tls(tls, tls_ca, tls_certificate, tls_key, tls_server_name, insecure)
    address = StateFolder().router_address(router)
    try:
        model, workers = asyncio.run(read_status(address, connection, api_key))
    except grpc.aio.AioRpcError as error:
        raise ConfigError(
            f"no router answers at {address}: {error_from_rpc(error).message}"
        ) from error
    console = make_console()
    console.print(
        f"router {address} serves [bold]{model.model_name}[/bold], "
        f"context {model.context_length}, "
        + (f"up to {model.max_images} images" if model.accepts_images else "text only")
    )
    console.print(status_table(workers))


async def read_status(
    address: str, connection: ClientTlsConfig | None = None, api_key: str = ""
) -> tuple[router_pb2.GetModelResponse, list[WorkerReport]]:
    """Asks the router, then every worker it knows at once.

    Raises:
        ConfigError: the connection would be plain text where it must not be.
        grpc.aio.AioRpcError: the router does not answer.
    """
    tls = ClientTls(connection or ClientTlsConfig(), address)
    metadata = (("x-api-key", api_key),) if api_key else ()
    async with open_channel(address, tls=tls.channel) as channel:
        model = await router_pb2_grpc.RouterServiceStub(channel).GetModel(
            router_pb2.GetModelRequest(), timeout=TIMEOUT_S, metadata=metadata
        )
    return model, list(await asyncio.gather(*(_ask(worker, tls) for worker in model.workers)))


async def _ask(seen: router_pb2.WorkerStatus, tls: ClientTls) -> WorkerReport:
    info = load = None
    try:
        role_tls = tls.channel_to(role_name(seen.role))
        async with open_channel(seen.address, tls=role_tls) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=TIMEOUT_S)
            watch = stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=TIMEOUT_S)
            load = await watch.read()
            watch.cancel()
    except grpc.aio.AioRpcError:
        pass  # the table shows what is known
    return WorkerReport(seen, info, load)


def status_table(workers: list[WorkerReport]) -> Table:
    """One row per worker."""
    table = Table()
    for column in ("role", "address", "health", "running", "waiting", "KV blocks", "embeddings"):
        table.add_column(column)
    table.add_column("transport")
    for worker in workers:
        seen, info, load = worker.seen, worker.info, worker.load
        health = "[green]serving[/green]" if seen.healthy else f"[red]{seen.reason or 'down'}[/red]"
        if load and load.draining:
            health = "[yellow]draining[/yellow]"
        table.add_row(
            "unified" if info and info.unified else seen.role,
            seen.address,
            health,
            str(load.running_requests) if load else "?",
            str(load.waiting_requests) if load else "?",
            _blocks(load) if load else "?",
            _embeddings(load) if load else "?",
            _transports(info) if info else "?",
        )
    return table


def _transports(info: worker_pb2.GetInfoResponse) -> str:
    """Such as ``nixl (shm, tcp), collective``: in parentheses what has really been used."""
    used = {one.transport: ", ".join(one.carriers) for one in info.carriers}
    names = [one.transport for one in info.agents]
    return ", ".join(f"{name} ({used[name]})" if used.get(name) else name for name in names)


def _blocks(load: worker_pb2.WatchLoadResponse) -> str:
    if not load.total_blocks:
        return "-"
    held = f", {load.quarantined_blocks} in quarantine" if load.quarantined_blocks else ""
    return f"{load.free_blocks} of {load.total_blocks} free{held}"


def _embeddings(load: worker_pb2.WatchLoadResponse) -> str:
    if not load.total_embedding_bytes:
        return "-"
    mib = 1024 * 1024
    quarantined = load.quarantined_embedding_bytes / mib
    held = f", {quarantined:.1f} in quarantine" if quarantined else ""
    free, total = load.free_embedding_bytes / mib, load.total_embedding_bytes / mib
    return f"{free:.1f} of {total:.1f} MiB free{held}"
