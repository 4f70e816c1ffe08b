"""The one place that decides how a connection is protected."""

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from epd.config import ConfigError
from epd.rpc.reloading_channel import ReloadingChannel
from epd.rpc.tls_files import TlsFiles, TlsMaterial


@dataclass(frozen=True)
class ChannelTls:
    """How a channel is encrypted.

    Args:
        files: This end's certificates.
        server_name: Name that the server's certificate must have; empty: the host.
    """

    files: TlsFiles
    server_name: str = ""


def add_port(
    server: grpc.aio.Server, host: str, port: int, *, insecure: bool, tls: TlsFiles | None = None
) -> int:
    """Binds the server and returns the real port.

    Raises:
        ConfigError: plain text on an address that is not loopback without ``insecure``, or the
            address cannot be bound, for example because the port is taken.
    """
    if tls is None:
        refuse_plain_text(host, "gRPC", insecure=insecure)
    address = join_address(host, port)
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, _server_credentials(tls))
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise ConfigError(f"cannot listen on {address}: is the port taken?")
    return bound


def make_channel(
    address: str,
    options: list[tuple[str, int | str]],
    interceptors: list[grpc.aio.ClientInterceptor],
    tls: ChannelTls | None = None,
) -> grpc.aio.Channel:
    """A channel to a peer, protected as servers of :func:`add_port` expect it."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    if tls.server_name:
        options = [*options, ("grpc.ssl_target_name_override", tls.server_name)]

    def secure(material: TlsMaterial) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(
            address, channel_credentials(material), options=options, interceptors=interceptors
        )

    return ReloadingChannel(secure, tls.files)


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    """What a client trusts, and what it shows to servers that ask."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)


def refuse_plain_text(host: str, what: str, *, insecure: bool) -> None:
    """Lets plain text pass to loopback, and everywhere when it was switched on by name.

    Raises:
        ConfigError: otherwise.
    """
    if not insecure and not is_loopback(host):
        raise ConfigError(
            f"{host} is not a loopback address and {what} is plain text; "
            "--insecure (EPD_INSECURE=1) allows it"
        )


def refuse_plain_text_peers(items: Iterable[str], *, insecure: bool) -> None:
    """The same for peers as discovery takes them. No name is looked up: names are not loopback.

    Raises:
        ConfigError: one of them is not loopback, or is no address.
    """
    for item in items:
        host, _ = split_address(item.removeprefix("dns:"))
        if host != "localhost" and not _is_loopback_address(host) and not insecure:
            raise ConfigError(
                f"{item} is not a loopback address and gRPC to it is plain text; "
                "--insecure (EPD_INSECURE=1) allows it"
            )


def _server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    served = files.current

    # gRPC asks at each handshake, on a thread of its own, and keeps what it has on None.
    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        if files.current is served:
            return None
        served = files.current
        return _server_certificates(served)

    return grpc.dynamic_ssl_server_credentials(
        _server_certificates(served),
        fetch,  # type: ignore[arg-type]
        require_client_authentication=served.client_ca is not None,
    )


def _server_certificates(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    assert material.key is not None, "a server's files are complete"
    assert material.certificate is not None
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.certificate)], root_certificates=material.client_ca
    )


def is_loopback(host: str) -> bool:
    """True when every address of ``host`` is loopback; an unknown name is not."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(_is_loopback_address(str(address)) for address in found)


def _is_loopback_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


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
