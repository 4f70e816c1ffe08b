"""Fleets of real processes: faults, restarts, and the commands on top of them."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from epd.fleet.process import FleetError
from epd.rpc.channels import open_channel
from epd.rpc.options import IMAGE_MESSAGE_BYTES
from tests.support.ask import ask, generate_request, greedy
from tests.support.fleet import fleet_of
from tests.support.reference import Question

ROOT = Path(__file__).parents[2]


def answer(fleet, text="hello"):
    async def run():
        async with open_channel(fleet.router_address, message_bytes=IMAGE_MESSAGE_BYTES) as channel:
            request = generate_request(Question(images=(), text=text), greedy(4))
            return await ask(channel, request)

    return asyncio.run(run())


def test_a_worker_can_be_killed_restarted_on_its_port_and_is_found_again(tiny_model):
    with fleet_of(tiny_model, encoders=0) as fleet:
        idle = fleet.idle_level()
        assert len(answer(fleet).token_ids) == 4
        fleet.assert_back_to_idle(idle, settled_within_s=5)
        address = fleet.process("decode-0").address
        fleet.kill_one("decode-0")
        with pytest.raises(FleetError, match="decode-0 ended with status -9"):
            fleet.check()
        assert fleet.restart("decode-0").address == address
        deadline = time.monotonic() + 15
        while True:
            try:
                assert len(answer(fleet).token_ids) == 4
                break
            except Exception:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        fleet.assert_back_to_idle(idle, settled_within_s=5)
        assert fleet.resident_bytes("decode-0") > 1 << 20
        assert fleet.open_files("decode-0") > 3


def test_a_level_that_differs_from_idle_is_noticed(shared_fleets, tiny_model):
    fleet = shared_fleets.get(tiny_model)
    idle = fleet.idle_level()
    changed = {
        name: type(level)(**{**vars(level), "free_and_quarantined_blocks": -1.0})
        for name, level in idle.items()
    }
    fleet.assert_back_to_idle(idle)
    with pytest.raises(AssertionError, match="not back to idle"):
        fleet.assert_back_to_idle(changed, within_s=0.2)


def test_a_fleet_that_cannot_start_leaves_nothing_behind(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(FleetError, match="ended with status"), fleet_of(tmp_path):
        pass
    left = {process.pid for process in psutil.Process().children(recursive=True)} - before
    assert not [pid for pid in left if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def epd_up(tmp_path, tiny_model):
    """``epd up`` as a person runs it."""
    command = [sys.executable, "-m", "epd.cli.main", "up", f"--model={tiny_model}", "--port=0"]
    output = (tmp_path / "output").open("w+")
    process = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "EPD_STATE": str(tmp_path), "COLUMNS": "200"},
    )

    def text():
        output.seek(0)
        return output.read()

    deadline = time.monotonic() + 110
    while "Ctrl-C stops" not in text():
        assert process.poll() is None, text()
        assert time.monotonic() < deadline, text()
        time.sleep(0.1)
    yield process, text
    process.kill()
    process.wait()
    output.close()


def services_of(process):
    return psutil.Process(process.pid).children(recursive=True)


def epd(*arguments, tmp_path):
    return subprocess.run(
        [sys.executable, "-m", "epd.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "EPD_STATE": str(tmp_path), "COLUMNS": "250"},
    )


def test_up_status_chat_trace_and_an_orderly_end(epd_up, tmp_path):
    process, text = epd_up
    rows = re.findall(r"│ (\S+) +│ (127\.0\.0\.1:\d+) │ (127\.0\.0\.1:\d+) │ \d+", text())
    assert [row[0] for row in rows] == ["encoder-0", "decode-0", "prefill-0", "router"]

    status = epd("status", tmp_path=tmp_path)
    assert status.returncode == 0, status.stderr
    assert status.stdout.count("serving") == 3
    assert "nixl" in status.stdout

    picture = str(ROOT / "epd" / "cli" / "sample.png")
    chat = epd("chat", "what?", "--image", picture, "--max-tokens", "4", tmp_path=tmp_path)
    assert chat.returncode == 0, chat.stderr

    deadline = time.monotonic() + 10
    while "kv_push" not in (trace := epd("trace", tmp_path=tmp_path)).stdout:
        assert time.monotonic() < deadline, trace.stderr
    for name in ("RouterService/Generate", "PrefillService/Prefill", "DecodeService/Decode"):
        assert name in trace.stdout
    assert "4 services" in trace.stdout

    started = services_of(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    psutil.wait_procs(started, timeout=2)
    assert not [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert "no router answers at 127.0.0.1:50050" in epd("status", tmp_path=tmp_path).stderr


def test_up_ends_with_one_line_when_a_service_dies(epd_up):
    process, text = epd_up
    started = services_of(process)
    (decode,) = [p for p in started if "services.decode" in p.cmdline()]
    decode.kill()
    assert process.wait(20) == 1
    assert "epd: decode-0 ended with status -9" in text().splitlines()[-1]
    psutil.wait_procs(started, timeout=2)
    assert not [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_services_end_with_a_supervisor_that_was_killed(epd_up):
    process, _ = epd_up
    started = services_of(process)
    process.kill()
    _, alive = psutil.wait_procs(started, timeout=15)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_the_demo_answers_shows_its_trace_and_stops(tiny_model, tmp_path):
    finished = epd("demo", f"--model={tiny_model}", "--port=0", "--max-tokens=6", tmp_path=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "describe the image." in finished.stdout
    assert "4 services" in finished.stdout
    assert "kv_push" in finished.stdout
    assert not finished.stderr
