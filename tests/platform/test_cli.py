"""The commands: what they print, and one clear line when they cannot work."""

import contextlib
import socket
import subprocess
import sys

import grpc
import pytest
from rich.console import Console

from epd.cli.status import read_status, status_table
from epd.fleet.plan import FleetPlan
from epd.fleet.state import StateFolder
from epd.rpc.worker_service import WorkerServicer
from epd.telemetry.received_span import ReceivedSpan
from epd.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc


def epd(*arguments, tmp_path, **environment):
    return subprocess.run(
        [sys.executable, "-m", "epd.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={"PATH": "/usr/bin:/bin", "EPD_STATE": str(tmp_path), "COLUMNS": "200", **environment},
    )


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def one_line(finished):
    """The only line on standard error of a failed command."""
    assert finished.returncode == 1
    (line,) = finished.stderr.strip().splitlines()
    return line


def test_a_folder_without_model_is_told_before_anything_starts(tmp_path):
    finished = epd("up", "--model", "/nowhere", tmp_path=tmp_path)
    assert one_line(finished) == (
        "epd: no model in /nowhere: there is no config.json; name one with --model"
    )


def test_a_taken_port_is_told_before_anything_starts(tmp_path, model_folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finished = epd("up", "--model", str(model_folder), "--port", str(port), tmp_path=tmp_path)
    assert one_line(finished) == f"epd: port {port} is taken; choose another with --port"


def test_a_fleet_that_cannot_serve_is_refused(tmp_path, model_folder):
    finished = epd("up", "--model", str(model_folder), "--prefills", "0", tmp_path=tmp_path)
    assert "prefill workers need decode workers" in one_line(finished) or (
        "a fleet needs prefill and decode workers" in one_line(finished)
    )


def test_a_worker_that_cannot_start_is_named_with_its_reason(tmp_path, model_folder):
    finished = epd("up", "--model", str(model_folder), "--port", "0", tmp_path=tmp_path)
    assert "ended with status" in one_line(finished)


def test_a_router_that_is_not_there_is_told(tmp_path):
    finished = epd("status", "--router", "127.0.0.1:1", tmp_path=tmp_path)
    assert one_line(finished).startswith("epd: no router answers at 127.0.0.1:1: ")


def test_the_latest_trace_is_shown_or_one_by_the_beginning_of_its_id(tmp_path):
    assert "no trace is kept yet" in one_line(epd("trace", tmp_path=tmp_path))
    traces = StateFolder({"EPD_STATE": str(tmp_path)}).traces
    for trace_id, name in (("aa" * 16, "old"), ("bb" * 16, "new")):
        kept = ReceivedSpan(trace_id, "1", "", name, "SERVER", "epd-router", "i", 0, 10**6, False)
        traces.add([kept])
    assert "new" in epd("trace", tmp_path=tmp_path).stdout
    epd("trace", "--svg", str(tmp_path / "new.svg"), tmp_path=tmp_path)
    assert "new" in (tmp_path / "new.svg").read_text()
    shown = epd("trace", "aaaa", tmp_path=tmp_path)
    assert "old" in shown.stdout
    assert "aa" * 16 in shown.stdout
    assert "no trace cc is kept" in one_line(epd("trace", "cc", tmp_path=tmp_path))


def test_the_router_is_found_by_flag_variable_running_fleet_and_default(tmp_path):
    state = StateFolder({"EPD_STATE": str(tmp_path)})
    assert state.router_address() == "127.0.0.1:50050"
    state.remember_router("127.0.0.1:7")
    assert state.router_address() == "127.0.0.1:7"
    by_variable = StateFolder({"EPD_STATE": str(tmp_path), "EPD_ROUTER": "h:8"})
    assert by_variable.router_address() == "h:8"
    assert by_variable.router_address("h:9") == "h:9"
    state.forget_router()
    assert state.router_address() == "127.0.0.1:50050"


@pytest.mark.parametrize(
    "counts", [{"prefills": 0}, {"decodes": 0}, {"prefills": 0, "decodes": 0}, {"encoders": -1}]
)
def test_a_plan_that_serves_nobody_is_no_plan(counts, tmp_path):
    with pytest.raises(ValueError, match="workers"):
        FleetPlan(tmp_path, **counts)


def test_a_plan_of_unified_workers_alone_is_one(tmp_path):
    plan = FleetPlan(tmp_path, encoders=0, prefills=0, decodes=0, unified=2)
    assert plan.process_count == 3


@contextlib.asynccontextmanager
async def served(*servicers):
    server = grpc.aio.server()
    for add, servicer in servicers:
        add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


class Router(router_pb2_grpc.RouterServiceServicer):
    def __init__(self, workers):
        self.workers = workers

    async def GetModel(self, request, context):
        return router_pb2.GetModelResponse(
            model_name="shapes-vl", context_length=4096, accepts_images=True, workers=self.workers
        )


async def test_status_shows_what_workers_tell_and_what_is_known_of_the_silent_ones(monkeypatch):
    monkeypatch.setattr("epd.cli.status.TIMEOUT_S", 60.0)
    mib = 1024 * 1024
    worker = WorkerServicer(
        lambda: worker_pb2.GetInfoResponse(agents=[common_pb2.AgentDescriptor(transport="nixl")]),
        lambda: worker_pb2.WatchLoadResponse(
            running_requests=3,
            waiting_requests=1,
            total_blocks=10,
            free_blocks=7,
            quarantined_blocks=2,
            total_embedding_bytes=8 * mib,
            free_embedding_bytes=6 * mib,
        ),
        heartbeat_s=1,
    )
    async with served((worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker)) as address:
        router = Router(
            [
                router_pb2.WorkerStatus(role="decode", address=address, healthy=True),
                router_pb2.WorkerStatus(
                    role="prefill", address="127.0.0.1:1", reason="silent for 3 s"
                ),
            ]
        )
        add = router_pb2_grpc.add_RouterServiceServicer_to_server
        async with served((add, router)) as front:
            model, workers = await read_status(front)
    assert model.model_name == "shapes-vl"
    console = Console(width=200, record=True, quiet=False)
    with console.capture() as captured:
        console.print(status_table(workers))
    lines = captured.get().splitlines()
    (decode,) = [line for line in lines if "decode" in line]
    for cell in ("serving", "7 of 10 free, 2 in quarantine", "6.0 of 8.0 MiB free", "nixl"):
        assert cell in decode
    (prefill,) = [line for line in lines if "prefill" in line]
    assert "silent for 3 s" in prefill
    assert "?" in prefill
