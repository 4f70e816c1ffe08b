"""A service process from start to exit, as a supervisor, a router and a client see it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from epd.errors import UnavailableError
from epd.fleet.process import FleetError, ServiceProcess
from epd.rpc.health_probe import ProbeConfig, probe
from epd.rpc.status import error_from_rpc
from epd.telemetry.prometheus import scrape
from epd.v1 import prefill_pb2, prefill_pb2_grpc
from tests.support.kept_port import keep_port, kept_port

SERVING = health_pb2.HealthCheckResponse.SERVING


@contextlib.contextmanager
def tiny(tmp_path, *flags, ready=True, **environment):
    process = ServiceProcess(
        "prefill",
        "tiny",
        [sys.executable, "-m", "tests.support.tiny_service", "--follow-stdin", *flags],
        {**os.environ, **environment},
        tmp_path,
    )
    process.start()
    try:
        if ready:
            process.wait_ready(90)
        yield process
    finally:
        process.kill()


def prefill(channel, *tokens, timeout=60):
    stub = prefill_pb2_grpc.PrefillServiceStub(channel)
    return stub.Prefill(prefill_pb2.PrefillRequest(token_ids=tokens), timeout=timeout)


def health(address, service=""):
    """What a patient probe is told."""
    return probe(ProbeConfig(address, service, timeout_s=60))


def test_a_ready_service_serves_health_reflection_calls_and_metrics(tmp_path):
    with tiny(tmp_path) as process:
        for name in ("", "epd.v1.PrefillService"):
            assert health(process.address, name) == "SERVING"
        assert health(process.address, "epd.v1.Nothing") == "NOT_FOUND"
        with grpc.insecure_channel(process.address) as channel:
            assert [r.first_token.token_id for r in prefill(channel, 5, 6)] == [5, 6]
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            (answer,) = stub.ServerReflectionInfo(iter([asked]))
            names = {service.name for service in answer.list_services_response.service}
        assert {"epd.v1.PrefillService", "grpc.health.v1.Health"} <= names
        scraped = scrape(process.metrics_address)
        assert scraped.total("rpc_server_call_duration_seconds_count") == 1
        assert 'service_name="epd-prefill"' in scraped.text


def test_while_loading_health_says_not_serving_and_calls_are_told_to_come_back(tmp_path):
    loaded = tmp_path / "loaded"
    with (
        kept_port() as port,
        tiny(tmp_path, f"--port={port}", f"--load-until={loaded}", ready=False) as process,
    ):
        address = f"127.0.0.1:{port}"
        while health(address) == "UNAVAILABLE":
            assert process.running
        assert health(address) == "NOT_SERVING"
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
            list(prefill(channel, 1))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        loaded.touch()
        process.wait_ready(90)
        assert health(address) == "SERVING"


def test_a_stop_lets_running_streams_finish_and_ends_with_status_0(tmp_path):
    with tiny(tmp_path, "--drain-notice-s=0.3") as process:
        with grpc.insecure_channel(process.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == SERVING
            stream = prefill(channel, *range(1, 31))
            next(stream)
            process.send_signal(signal.SIGTERM)
            assert next(watch).status != SERVING
            assert len(list(stream)) == 29
        assert process.wait(60) == 0
        assert "application stopped" in process.log()


def test_a_stop_does_not_wait_for_those_who_only_watch(tmp_path):
    with (
        tiny(tmp_path, "--drain-notice-s=0", "--drain-grace-s=300") as process,
        grpc.insecure_channel(process.address) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_what_outlasts_the_grace_period_ends_with_unavailable(tmp_path):
    with tiny(tmp_path, "--drain-notice-s=0", "--drain-grace-s=0.3") as process:
        with grpc.insecure_channel(process.address) as channel:
            stream = prefill(channel, *range(1, 400))
            next(stream)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError) as caught:
                list(stream)
        refusal: Any = caught.value  # a call as well, which its type does not say
        error = error_from_rpc(refusal)
        assert isinstance(error, UnavailableError)
        assert (error.reason, error.retry_after_s > 0) == ("SHUTTING_DOWN", True)
        assert process.wait(60) == 0


def test_a_failed_service_reports_not_serving_and_stays_up(tmp_path):
    with tiny(tmp_path) as process:
        with grpc.insecure_channel(process.address) as channel:
            list(prefill(channel, 0))
        assert health(process.address) == "NOT_SERVING"
        assert health(process.address, "epd.v1.PrefillService") == "NOT_SERVING"
        assert process.running
        assert "not serving any more: engine died" in process.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_loading_is_obeyed_at_once(tmp_path, number):
    with (
        kept_port() as port,
        tiny(tmp_path, f"--port={port}", "--load-until=/nowhere", ready=False) as process,
    ):
        while health(f"127.0.0.1:{port}") != "NOT_SERVING":
            assert process.running
        process.send_signal(number)
        assert process.wait(60) == 0


def test_a_service_that_follows_its_supervisor_ends_with_it(tmp_path):
    with tiny(tmp_path) as process:
        process._process.stdin.close()
        assert process.wait(60) == 0


def test_a_taken_port_is_one_clear_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with tiny(tmp_path, f"--port={port}", ready=False) as process:
            with pytest.raises(FleetError, match=f"cannot listen on 127.0.0.1:{port}"):
                process.wait_ready(90)
            assert process.exit_status == 2
        with tiny(tmp_path, f"--metrics-port={port}", ready=False) as process:
            with pytest.raises(FleetError, match=f"cannot serve metrics on 127.0.0.1:{port}"):
                process.wait_ready(90)
            assert process.exit_status == 2


def test_plain_text_leaves_this_machine_only_when_asked_to(tmp_path):
    with tiny(tmp_path, "--host=0.0.0.0", ready=False) as process:
        with pytest.raises(FleetError, match=r"--insecure \(EPD_INSECURE=1\) allows it"):
            process.wait_ready(90)
        assert process.exit_status == 2
    with tiny(tmp_path, "--host=0.0.0.0", EPD_INSECURE="1") as process:
        assert health(process.address) == "SERVING"


def test_a_failed_load_is_one_clear_line_and_status_1(tmp_path):
    failed = pytest.raises(FleetError, match="ended with status 1: prefill: no weights")
    with tiny(tmp_path, "--load-error=no weights", ready=False) as process, failed:
        process.wait_ready(90)


def test_a_model_folder_that_is_not_there_is_one_clear_line_and_status_1(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "services.encoder", f"--model={tmp_path}/none"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("encoder: ")
    assert f"{tmp_path}/none" in last


def test_an_unused_variable_is_named_in_the_log(tmp_path):
    with tiny(tmp_path, EPD_STEP_SS="3") as process:
        assert "variables that prefill does not use: EPD_STEP_SS" in process.log()


def test_a_service_that_never_gets_ready_is_given_up(tmp_path):
    failed = pytest.raises(FleetError, match=r"tiny was not ready after 0\.5 s")
    with tiny(tmp_path, "--load-until=/nowhere", ready=False) as process, failed:
        process.wait_ready(0.5)


def test_a_restart_on_the_same_port_is_reached_by_the_same_channel(tmp_path):
    with tiny(tmp_path) as process, grpc.insecure_channel(process.address) as channel:
        assert len(list(prefill(channel, 1))) == 1
        address = process.address
        process.kill()
        with keep_port(address):
            process.restart_on(address)
            process.wait_ready(90)
        assert process.address == address
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        again = prefill_pb2.PrefillRequest(token_ids=[1])
        assert len(list(stub.Prefill(again, timeout=60, wait_for_ready=True))) == 1


def test_without_an_otlp_endpoint_nothing_is_exported_and_nothing_is_said(tmp_path):
    with tiny(tmp_path) as process:
        with grpc.insecure_channel(process.address) as channel:
            traced = [("traceparent", f"00-{'a' * 32}-{'b' * 16}-01")]
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            list(stub.Prefill(prefill_pb2.PrefillRequest(token_ids=[1]), metadata=traced))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        lines = [line for line in process.log().splitlines() if "WARN" in line or "ERR" in line]
        assert lines == []


def test_the_health_probe_is_a_command(tmp_path):
    with tiny(tmp_path) as process:
        command = [sys.executable, "-m", "epd.rpc.health_probe", "--address", process.address]
        assert subprocess.run([*command, "--timeout-s=60"], check=False).returncode == 0
        process.kill()
        assert subprocess.run([*command, "--timeout-s=1"], check=False, timeout=60).returncode == 1
