"""The one place that decides how a connection is protected. Plain text so far."""

import ipaddress
import socket

import grpc

from epd.config import ConfigError


def add_port(server: grpc.aio.Server, host: str, port: int, *, insecure: bool) -> int:
    """Binds the server and returns the real port.

    Raises:
        ConfigError: plain text on an address that is not loopback without ``insecure``, or the
            address cannot be bound, for example because the port is taken.
    """
    if not insecure and not is_loopback(host):
        raise ConfigError(
            f"{host} is not a loopback address and the connection is plain text; "
            "--insecure (EPD_INSECURE=1) allows it"
        )
    try:
        bound = server.add_insecure_port(join_address(host, port))
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise ConfigError(f"cannot listen on {join_address(host, port)}: is the port taken?")
    return bound


def make_channel(
    address: str,
    options: list[tuple[str, int | str]],
    interceptors: list[grpc.aio.ClientInterceptor],
) -> grpc.aio.Channel:
    """A channel to a peer, protected as servers of :func:`add_port` expect it."""
    return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)


def is_loopback(host: str) -> bool:
    """True when every address of ``host`` is loopback; an unknown name is not."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address)).is_loopback for address in found)


def join_address(host: str, port: int) -> str:
    """host:port, with IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The parts of ``host:port``; an IPv6 host is in brackets.

    Raises:
        ConfigError: not of that form.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
