"""TLS between processes: who is let in, what the others are told, and files that change."""

import asyncio
import contextlib
import itertools
import os
import socket
import ssl
import sys
import time

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epd.config import ConfigError, resolve
from epd.errors import EpdError, PermissionDeniedError, UnavailableError
from epd.fleet.process import FleetError, ServiceProcess
from epd.rpc.access import CALLERS
from epd.rpc.channels import open_channel
from epd.rpc.client_tls import ClientTls
from epd.rpc.credentials import ChannelTls
from epd.rpc.health_probe import ProbeConfig, probe
from epd.rpc.reloading_channel import ReloadingChannel
from epd.rpc.roles import role_name
from epd.rpc.server import GrpcServer
from epd.rpc.server_config import ServerConfig
from epd.rpc.status import error_from_rpc
from epd.rpc.tls_config import ClientTlsConfig
from epd.rpc.tls_files import TlsFiles
from epd.telemetry.prometheus import scrape
from epd.v1 import decode_pb2, encoder_pb2, prefill_pb2, prefill_pb2_grpc, worker_pb2
from tests.support.certificates import Authority, CertificateFiles, replace

PREFILL_NAME = role_name("prefill")
#: A call that nobody refuses would wait so long.
PATIENCE_S = 60
#: A service reads its files every tenth of this.
RELOADED_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def router(authority, folder):
    return authority.issue(folder, "router")


@pytest.fixture(scope="module")
def service(authority, folder, tmp_path_factory):
    """A worker of role prefill whose certificate may be replaced."""
    files = authority.issue(folder, "prefill")
    logs = tmp_path_factory.mktemp("logs")
    with started(logs, "--tls-reload-s=0.1", *files.flags) as process:
        process.wait_ready(90)
        yield process


@contextlib.contextmanager
def started(logs, *flags):
    """A service that may or may not get ready."""
    command = [sys.executable, "-m", "tests.support.tiny_service", "--follow-stdin", *flags]
    process = ServiceProcess("prefill", "tiny", command, dict(os.environ), logs)
    process.start()
    try:
        yield process
    finally:
        process.kill()


async def call(service, tls: ClientTlsConfig, tokens=1):
    """How many answers a request gets; a failure is the typed error."""
    client = ClientTls(tls, service.address)
    async with open_channel(service.address, tls=client.channel) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        request = prefill_pb2.PrefillRequest(token_ids=range(1, tokens + 1))
        try:
            return len([one async for one in stub.Prefill(request, timeout=PATIENCE_S)])
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


async def test_a_router_is_served_over_mutual_tls(service, router):
    assert await call(service, router.client(PREFILL_NAME)) == 1


async def refused(service, tls: ClientTlsConfig) -> EpdError:
    started = time.monotonic()
    with pytest.raises(EpdError) as caught:
        await call(service, tls)
    assert time.monotonic() - started < PATIENCE_S / 2, "it waited instead of being told"
    return caught.value


async def test_a_client_that_expects_another_role_does_not_talk_to_this_one(service, router):
    error = await refused(service, router.client(role_name("decode")))
    assert isinstance(error, UnavailableError)
    assert error.reason == "SERVER_NAME_MISMATCH"


async def test_a_client_that_does_not_trust_the_ca_says_so(service, router, tmp_path):
    other = tmp_path / "other.pem"
    replace(other, Authority().pem)
    error = await refused(
        service,
        CertificateFiles(router.certificate, router.key, other).client(PREFILL_NAME),
    )
    assert (type(error), error.reason) == (UnavailableError, "SERVER_NOT_TRUSTED")


async def test_without_a_certificate_or_with_one_of_another_ca_nobody_gets_in(
    service, router, tmp_path
):
    stranger = Authority().issue(tmp_path, "router")
    for tls in (
        ClientTlsConfig(tls_ca=router.ca, tls_server_name=PREFILL_NAME),
        CertificateFiles(stranger.certificate, stranger.key, router.ca).client(PREFILL_NAME),
    ):
        error = await refused(service, tls)
        assert (type(error), error.reason) == (UnavailableError, "CONNECTION_REFUSED_BY_SERVER")
        assert "--tls-certificate" in error.message


async def test_plain_text_to_a_server_with_tls_is_told_apart_from_a_dead_server(service):
    error = await refused(service, ClientTlsConfig())
    assert (type(error), error.reason) == (UnavailableError, "CONNECTION_REFUSED_BY_SERVER")
    assert "it may speak TLS" in error.message


async def test_a_role_that_may_not_call_is_denied_by_name(service, authority, tmp_path):
    decode = authority.issue(tmp_path, "decode")
    error = await refused(service, decode.client(PREFILL_NAME))
    assert (type(error), error.reason) == (PermissionDeniedError, "ROLE_NOT_ALLOWED")
    assert "decode" in error.message
    assert "epd.v1.PrefillService/Prefill" in error.message


def test_every_call_of_every_worker_has_its_callers():
    methods = {
        f"{service.full_name}/{method.name}"
        for file in (encoder_pb2, prefill_pb2, decode_pb2, worker_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods == set(CALLERS)


def test_health_is_probed_with_any_certificate_and_not_without(service, authority, tmp_path):
    operator = authority.issue(tmp_path, "operator").client(PREFILL_NAME)
    assert probe(ProbeConfig(service.address, tls=operator)) == "SERVING"
    assert probe(ProbeConfig(service.address)) == "UNAVAILABLE"


@contextlib.asynccontextmanager
async def serving(tls):
    server = GrpcServer(ServerConfig(drain_notice_s=0, drain_grace_s=0), [], tls=tls)
    await server.start()
    await server.set_serving()
    try:
        yield server.address
    finally:
        await server.stop()


async def test_a_server_without_client_ca_asks_for_no_certificate(authority, tmp_path):
    files = authority.issue(tmp_path, "router", "127.0.0.1")
    async with serving(TlsFiles(files.client(""))) as address:
        asked = ProbeConfig(address, tls=ClientTlsConfig(tls_ca=files.ca))
        assert await asyncio.to_thread(probe, asked) == "SERVING"


async def test_tls_to_a_server_with_plain_text_is_told_as_such(router):
    async with serving(None) as address:
        client = ClientTls(router.client(PREFILL_NAME), address)
        async with open_channel(address, tls=client.channel) as channel:
            request = prefill_pb2.PrefillRequest()
            call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(request, timeout=PATIENCE_S)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
    assert error_from_rpc(caught.value).reason == "SERVER_WITHOUT_TLS"


def test_metrics_come_over_mutual_tls_and_a_silent_client_holds_nobody_up(service, router):
    host, _, port = service.metrics_address.rpartition(":")
    with socket.create_connection((host, int(port))):
        text = scrape(service.metrics_address, PATIENCE_S, router.context()).text
    assert "rpc_server_call_duration_seconds" in text
    stranger = ssl.create_default_context(cafile=router.ca)
    stranger.check_hostname = False
    with pytest.raises(OSError, match=r"(?i)certificate.required|reset|closed|pipe|EOF"):
        scrape(service.metrics_address, PATIENCE_S, stranger)


async def test_a_new_certificate_is_used_at_once_and_streams_on_the_old_one_finish(
    service, authority, folder, router
):
    client = ClientTls(router.client(PREFILL_NAME), service.address)
    client.start()
    assert client.channel is not None
    files_in_use = client.channel.files
    async with open_channel(service.address, tls=client.channel) as channel:
        assert isinstance(channel, ReloadingChannel)
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        long = stub.Prefill(prefill_pb2.PrefillRequest(token_ids=range(1, 101)))
        answers = aiter(long)
        await anext(answers)
        files = authority.issue(folder, "prefill")
        authority.issue(folder, "router")
        for address in (service.address, service.metrics_address):
            await until(lambda at=address: served_serial(at, router) == files.serial)
        await until(lambda: files_in_use.current.certificate == router.certificate.read_bytes())
        for _ in range(3):
            again = stub.Prefill(prefill_pb2.PrefillRequest(token_ids=[1]), timeout=PATIENCE_S)
            assert len([one async for one in again]) == 1
        assert len(channel._retired) == 1, "the stream's channel is the only old one"
        assert len([one async for one in answers]) == 99
        await until(lambda: not channel._retired)
    await client.stop()


async def test_a_ca_is_replaced_in_three_steps_and_every_call_is_answered(tmp_path):
    old, new = Authority(), Authority()
    ends = ((tmp_path / "server", "prefill"), (tmp_path / "client", "router"))
    server, client = (old.issue(*end) for end in ends)
    served = TlsFiles(server.client(""), client_ca=server.ca)
    shown = TlsFiles(client.client(""))
    async with (
        serving(served) as address,
        open_channel(address, tls=ChannelTls(shown, PREFILL_NAME)) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)

        async def answered():
            for files in (served, shown):
                files.refresh()
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)

        def trust(*authorities):
            for files in (server, client):
                replace(files.ca, b"".join(one.pem for one in authorities))

        await answered()
        trust(old, new)
        await answered()
        for end in ends:
            new.issue(*end)
        await answered()
        trust(new)
        await answered()
        late = old.issue(tmp_path / "late", "router")
        replace(late.ca, new.pem)
        for files, status in ((client, "SERVING"), (late, "UNAVAILABLE")):
            asked = ProbeConfig(address, tls=files.client(PREFILL_NAME))
            assert await asyncio.to_thread(probe, asked) == status


async def until(condition):
    """Waits for what another process does."""
    deadline = time.monotonic() + RELOADED_WITHIN_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def served_serial(address, files: CertificateFiles) -> int:
    """Serial number of the certificate that a new connection meets."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port))) as plain,
        files.context().wrap_socket(plain) as tls,
    ):
        certificate = tls.getpeercert(binary_form=True)
    assert certificate is not None
    return x509.load_der_x509_certificate(certificate).serial_number


def test_files_that_do_not_fit_together_change_nothing(authority, tmp_path, caplog):
    files = authority.issue(tmp_path, "decode")
    tls = TlsFiles(files.client(""))
    before = tls.current
    assert "PRIVATE KEY" not in repr(before)
    replace(files.key, authority.issue(tmp_path / "other", "decode").key.read_bytes())
    for _ in range(3):
        tls.refresh()
    assert tls.current is before
    assert len([line for line in caplog.messages if "stay as they were" in line]) == 1
    files.key.unlink()
    tls.refresh()
    assert tls.current is before
    authority.issue(tmp_path, "decode")
    tls.refresh()
    assert tls.current is not before


FILES = ("certificate", "key", "ca")


@pytest.mark.parametrize(
    "given", [some for count in (1, 2) for some in itertools.combinations(FILES, count)]
)
def test_a_service_takes_all_files_or_none(given):
    with pytest.raises(ConfigError, match="go together"):
        resolve(ServerConfig, [f"--tls-{name}=/x" for name in given], {})


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used_is_named(authority, tmp_path, name):
    files = authority.issue(tmp_path, "prefill")
    for spoil in (lambda file: file.write_text("nonsense"), lambda file: file.unlink()):
        spoil(getattr(files, name))
        with pytest.raises(ConfigError, match=str(getattr(files, name))):
            TlsFiles(files.client(""))


def test_a_service_with_such_a_file_ends_with_one_clear_line(tmp_path):
    missing = CertificateFiles(*(tmp_path / f"{name}.pem" for name in FILES))
    clear = pytest.raises(FleetError, match=r"status 2: prefill: cannot read .*certificate\.pem")
    with started(tmp_path, *missing.flags) as process, clear:
        process.wait_ready(90)


def test_a_client_sends_plain_text_to_loopback_only_unless_told_to():
    for address in ("127.0.0.1:1", "[::1]:1", "localhost:1"):
        assert ClientTls(ClientTlsConfig(), address).channel is None
    for address in ("10.0.0.1:1", "router:1"):
        with pytest.raises(ConfigError, match="--insecure"):
            ClientTls(ClientTlsConfig(), address)
        assert ClientTls(ClientTlsConfig(insecure=True), address).channel is None
        assert ClientTls(ClientTlsConfig(tls=True), address).channel is not None


def test_plain_metrics_leave_this_machine_only_when_asked_to(tmp_path):
    refused = pytest.raises(FleetError, match="metrics endpoint is plain text")
    with started(tmp_path, "--metrics-host=0.0.0.0") as process, refused:
        process.wait_ready(90)
