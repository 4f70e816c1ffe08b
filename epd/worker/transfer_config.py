"""Settings of a worker's data plane."""

import socket
from dataclasses import dataclass
from typing import Literal

from epd.config import option
from epd.rpc.credentials import split_address
from epd.transfer.collective_options import CollectiveOptions
from epd.transfer.factory import TransportOptions
from epd.transfer.mooncake_backend import MooncakeOptions
from epd.transfer.nixl_backend import NixlOptions


@dataclass(frozen=True)
class TransferConfig:
    """Which transports a worker has and how they are set up."""

    transport: tuple[Literal["nixl", "mooncake", "collective", "local"], ...] = option(
        ("nixl",),
        help="transports, the preferred one first; two workers use the first one of the side that "
        "begins the transfers which the other has too",
    )
    nixl_backend: Literal["UCX", "LIBFABRIC"] = option(
        "UCX", help="NIXL's own transport; UCX chooses between shared memory, RDMA and TCP"
    )
    mooncake_protocol: Literal["tcp", "rdma"] = option("tcp", help="what Mooncake moves data over")
    mooncake_device: str = option(
        "", help="RDMA devices for Mooncake, separated by commas; empty lets it choose"
    )
    collective_timeout_s: float = option(
        30.0,
        help="a collective pair is given up when one send or receive takes so long",
        unit="s",
        minimum=0.1,
    )

    def __post_init__(self) -> None:
        if not self.transport:
            raise ValueError("--transport names no transport")

    def options(self, address: str) -> TransportOptions:
        """What the transports are told. ``address``: host:port by which peers reach the worker.

        Blocks for a moment where the host is a name.
        """
        host, _ = split_address(address)
        return TransportOptions(
            host=str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]),
            nixl=NixlOptions(backend=self.nixl_backend),
            mooncake=MooncakeOptions(self.mooncake_protocol, self.mooncake_device),
            collective=CollectiveOptions(self.collective_timeout_s),
        )
