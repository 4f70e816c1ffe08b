"""Fleets of real processes: faults, restarts, and the commands on top of them."""

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import grpc
import psutil
import pytest

from epd.fleet.process import FleetError
from epd.rpc.channels import open_channel
from epd.rpc.options import IMAGE_MESSAGE_BYTES
from tests.support.ask import ask, generate_request, greedy
from tests.support.fleet import fleet_of
from tests.support.reference import Question
from tests.support.tiny_model import make_tiny_llama

ROOT = Path(__file__).parents[2]


def answer(fleet, text="hello"):
    async def run():
        async with open_channel(fleet.router_address, message_bytes=IMAGE_MESSAGE_BYTES) as channel:
            request = generate_request(Question(images=(), text=text), greedy(4))
            return await ask(channel, request)

    return asyncio.run(run())


def answers(fleet):
    try:
        return len(answer(fleet).token_ids) == 4
    except grpc.aio.AioRpcError:
        return False


def wait_until(done, seconds):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_worker_can_be_killed_restarted_on_its_port_and_is_found_again(tmp_path):
    with fleet_of(make_tiny_llama(tmp_path), encoders=0) as fleet:
        idle = fleet.idle_level()
        assert len(answer(fleet).token_ids) == 4
        fleet.assert_back_to_idle(idle, settled_within_s=20)
        fuller = dataclasses.replace(idle["decode-0"], free_and_quarantined_blocks=1e9)
        with pytest.raises(AssertionError, match=r"not back to idle.*decode-0"):
            fleet.assert_back_to_idle({**idle, "decode-0": fuller}, within_s=0.1)
        address = fleet.process("decode-0").address
        fleet.kill_one("decode-0")
        with pytest.raises(FleetError, match="decode-0 ended with status -9"):
            fleet.check()
        assert fleet.restart("decode-0").address == address
        wait_until(lambda: answers(fleet), 120)
        fleet.assert_back_to_idle(idle, settled_within_s=20)
        assert fleet.resident_bytes("decode-0") > 1 << 20
        assert fleet.open_files("decode-0") > 3


def test_a_fleet_that_cannot_start_leaves_nothing_behind(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(FleetError, match="ended with status"), fleet_of(tmp_path):
        pass
    left = {process.pid for process in psutil.Process().children(recursive=True)} - before
    assert not [pid for pid in left if lives(pid)]


@contextlib.contextmanager
def epd_up(tmp_path, *flags):
    """``epd up`` as a person runs it: the process, and a function for its output so far."""
    command = [sys.executable, "-m", "epd.cli.main", "up", "--port=0", "--http-port=0", *flags]
    with (tmp_path / "output").open("w+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "EPD_STATE": str(tmp_path), "COLUMNS": "200"},
        )

        def text():
            return (tmp_path / "output").read_text()

        try:
            wait_until(lambda: "Ctrl-C stops" in text() or process.poll() is not None, 240)
            assert process.poll() is None, text()
            yield process, text
        finally:
            process.kill()
            process.wait()


def services_of(process):
    return psutil.Process(process.pid).children(recursive=True)


def epd(*arguments, tmp_path):
    return subprocess.run(
        [sys.executable, "-m", "epd.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "EPD_STATE": str(tmp_path), "COLUMNS": "250"},
    )


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_up_status_chat_trace_and_an_orderly_end(tiny_model, tmp_path):
    with epd_up(tmp_path, f"--model={tiny_model}") as (process, text):
        rows = re.findall(r"│ (\S+) +│ (127\.0\.0\.1:\d+) │ (127\.0\.0\.1:\d+) │ \d+", text())
        assert [row[0] for row in rows] == ["encoder-0", "decode-0", "prefill-0", "router"]
        api = re.search(r"OpenAI API at (http://127\.0\.0\.1:\d+/v1)", text().replace("\n", ""))
        assert api is not None
        assert b'"owned_by":"epd"' in urllib.request.urlopen(f"{api[1]}/models", timeout=20).read()

        def all_are_shown():
            status = epd("status", tmp_path=tmp_path)
            return status.stdout.count("serving") == 3 and "nixl" in status.stdout

        wait_until(all_are_shown, 120)

        picture = str(ROOT / "epd" / "cli" / "sample.png")
        chat = epd("chat", "what?", "--image", picture, "--max-tokens", "4", tmp_path=tmp_path)
        assert chat.returncode == 0, chat.stderr

        methods = ("RouterService/Generate", "PrefillService/Prefill", "DecodeService/Decode")
        expected = (*methods, "kv_push", "4 services")

        def all_is_told():
            trace = epd("trace", tmp_path=tmp_path).stdout
            return all(text in trace for text in expected)

        wait_until(all_is_told, 120)

        started = services_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert_gone(started)
    assert "no router answers at 127.0.0.1:50050" in epd("status", tmp_path=tmp_path).stderr


def test_up_ends_with_one_line_when_a_service_dies(tiny_model, tmp_path):
    alone = ("--encoders=0", "--prefills=0", "--decodes=0", "--unified=1")
    with epd_up(tmp_path, f"--model={tiny_model}", *alone) as (process, text):
        started = services_of(process)
        next(p for p in started if "services.decode" in p.cmdline()).kill()
        assert process.wait(120) == 1
        assert "epd: unified-0 ended with status -9" in text().splitlines()[-1]
        assert_gone(started)


def test_services_end_with_a_supervisor_that_was_killed(tmp_path):
    supervisor = f"""
import os, pathlib, sys
from epd.fleet.process import ServiceProcess
command = [sys.executable, "-m", "tests.support.tiny_service", "--follow-stdin"]
for name in ("one", "two"):
    process = ServiceProcess("prefill", name, command, os.environ, pathlib.Path({str(tmp_path)!r}))
    process.start()
    process.wait_ready(60)
    print(process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", supervisor], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9
    assert len(done.stdout.split()) == 2, done.stderr
    wait_until(lambda: not any(lives(int(pid)) for pid in done.stdout.split()), 60)


def lives(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_the_demo_answers_shows_its_trace_and_stops(tiny_model, tmp_path):
    finished = epd("demo", f"--model={tiny_model}", "--port=0", "--max-tokens=6", tmp_path=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "describe the image." in finished.stdout
    assert "4 services" in finished.stdout
    assert "kv_push" in finished.stdout
    assert not finished.stderr
