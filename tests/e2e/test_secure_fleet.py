"""Four processes over mutual TLS: answers, rotation of a whole CA, and what must never be told."""

import asyncio
import base64
import contextlib
import io
import json
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from PIL import Image, PngImagePlugin, TiffImagePlugin

from epd.client import EpdClient, Sampling
from epd.errors import EpdError
from epd.fleet.plan import ROLES
from epd.rpc.roles import role_name
from epd.telemetry.prometheus import scrape
from tests.support.certificates import Authority, replace
from tests.support.fleet import fleet_of
from tests.support.questions import make_questions

API_KEY = "Xmarkerkey77"
#: Never in a log, span or metric: prompt, key, wrong key, texts inside of images, a schema.
MARKERS = (
    "Xmarkerprompt77",
    API_KEY,
    "Xmarkerwrongkey77",
    "Xmarkerpng77",
    "Xmarkertiff77",
    "Xmarkerschema77",
)
#: A service reads its files every tenth of this, if the machine lets it.
RELOADED_WITHIN_S = 60.0


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every export as it came: names, attributes, events, statuses."""

    def __init__(self):
        self.exports = []

    def Export(self, request, context):
        self.exports.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


class SecureFleet:
    """A fleet whose processes have certificates of an authority, and what belongs to it."""

    def __init__(self, fleet, files, collector):
        self.fleet = fleet
        self.files = files
        self.collector = collector

    def client(self, api_key=API_KEY):
        tls = self.files["operator"].client(role_name("router"))
        return EpdClient(self.fleet.router_address, timeout_s=200, api_key=api_key, tls=tls)

    def http(self, path, body=None, api_key=API_KEY):
        """Status and body of an HTTP request to the router."""
        request = urllib.request.Request(
            f"https://{self.fleet.http_address}{path}",
            data=json.dumps(body).encode() if body is not None else None,
            headers={"authorization": f"Bearer {api_key}"},
        )
        context = self.files["operator"].context()
        context.set_alpn_protocols(["http/1.1"])
        try:
            with urllib.request.urlopen(request, timeout=60, context=context) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def secure(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority()
    files = {role: authority.issue(folder, role, "127.0.0.1") for role in (*ROLES, "operator")}
    flags = {role: ("--tls-reload-s=0.1", *files[role].flags) for role in ROLES}
    flags["router"] += (f"--tls-client-ca={files['router'].ca}",)
    with collecting() as (collector, endpoint):
        environment = {
            "EPD_LOG_LEVEL": "DEBUG",
            "EPD_API_KEYS": f"team:{API_KEY}",
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        }
        with fleet_of(model, flags=flags, environment=environment) as fleet:
            yield SecureFleet(fleet, files, collector)


@contextlib.contextmanager
def collecting():
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(1.0).wait()


async def test_an_image_request_is_answered_over_mutual_tls(secure, reference):
    question = make_questions(3, seed=77)[2]
    assert question.images
    async with secure.client() as client:
        answer = await client.collect(
            question.text,
            images=question.images,
            sampling=Sampling(max_tokens=12, ignore_eos=True),
        )
    assert list(answer.token_ids) == reference.greedy(question, 12)


def test_https_answers_with_a_client_certificate_and_not_without(secure):
    assert secure.http("/health") == (200, "ok")
    status, body = secure.http(
        "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    )
    assert status in (200, 404), body
    stranger = ssl.create_default_context(cafile=secure.files["operator"].ca)
    with pytest.raises(OSError, match=r"(?i)certificate.required|reset|closed|pipe|EOF"):
        urllib.request.urlopen(
            f"https://{secure.fleet.http_address}/health", timeout=60, context=stranger
        )
    with pytest.raises((OSError, ValueError)):
        urllib.request.urlopen(f"http://{secure.fleet.http_address}/health", timeout=60)


async def test_an_operator_sees_every_worker(secure):
    await until(lambda: not problem_of_status(secure))


def problem_of_status(secure):
    """What ``epd status`` does not show; a worker that answers late shows a question mark."""
    files = secure.files["operator"]
    shown = subprocess.run(
        [
            *(sys.executable, "-m", "epd.cli.main", "status"),
            *("--router", secure.fleet.router_address, *files.flags),
            *("--tls-server-name", role_name("router"), "--api-key", API_KEY),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert shown.returncode == 0, shown.stderr
    complete = shown.stdout.count("serving") == 3 and "?" not in shown.stdout
    return "" if complete else shown.stdout


def picture(kind):
    """A file with a text inside of it."""
    image, file = Image.new("RGB", (60, 60), "red"), io.BytesIO()
    if kind == "png":
        text = PngImagePlugin.PngInfo()
        text.add_text("Comment", "Xmarkerpng77")
        image.save(file, "PNG", pnginfo=text)
    else:
        tags = TiffImagePlugin.ImageFileDirectory_v2()
        tags[270] = "Xmarkertiff77"  # ImageDescription
        image.save(file, "TIFF", tiffinfo=tags)
    return file.getvalue()


async def test_prompts_images_and_keys_are_in_no_log_line_span_or_metric(secure):
    prompt = "what is Xmarkerprompt77?"
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    images = [picture("png"), picture("tiff")]
    async with secure.client() as client:
        await client.collect(prompt, images=images, sampling=sampling)
        # What is refused says why, and the reason must not quote it.
        with pytest.raises(EpdError):
            await client.collect(prompt, images=[b"GIF89a" + prompt.encode()], sampling=sampling)
        with pytest.raises(EpdError):
            await client.collect(prompt * 4000, sampling=sampling)
    async with secure.client("Xmarkerwrongkey77") as client:
        with pytest.raises(EpdError, match="valid API key"):
            await client.collect(prompt, sampling=sampling)
    url = "data:image/png;base64," + base64.b64encode(images[0]).decode()
    content = [{"type": "text", "text": prompt}, {"type": "image_url", "image_url": {"url": url}}]
    name = json.loads(secure.http("/v1/models")[1])["data"][0]["id"]
    chat = {"model": name, "messages": [{"role": "user", "content": content}], "max_tokens": 3}
    schema = {"type": "Xmarkerschema77"}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    path = "/v1/chat/completions"
    assert secure.http(path, chat)[0] == 200
    assert secure.http(path, {**chat, "response_format": format})[0] == 400
    assert secure.http(path, {**chat, "messages": [{"role": prompt, "content": prompt}]})[0] == 400
    assert secure.http(path, chat, "Xmarkerwrongkey77")[0] == 401

    operator = secure.files["operator"].context()
    operator.set_alpn_protocols(["http/1.1"])
    told = {
        name: process.log() + scrape(process.metrics_address, 60, operator).text
        for name, process in secure.fleet.processes.items()
    }
    services = {"epd-router", "epd-encoder", "epd-prefill", "epd-decode"}
    await until(lambda: services <= set(re.findall(r"epd-\w+", str(secure.collector.exports))))
    told["spans"] = str(secure.collector.exports)
    logs = [text for name, text in told.items() if name != "spans"]
    assert all("'log_level': 'DEBUG'" in log for log in logs)
    secrets = [*MARKERS, base64.b64encode(images[0]).decode()[40:80]]
    found = {
        (name, secret): text[max(0, text.index(secret) - 300) :][:400]
        for name, text in told.items()
        for secret in secrets
        if secret in text
    }
    assert not found


async def test_a_whole_ca_is_replaced_under_load_and_no_request_fails(secure):
    """Last: afterwards the processes trust the new CA only."""
    old = secure.files["router"].ca.read_bytes()
    new = Authority()
    everyone = [*ROLES, "operator"]
    folder = secure.files["router"].ca.parent
    done = asyncio.Event()
    answered = 0

    async def ask_on():
        nonlocal answered
        async with secure.client() as client:
            while not done.is_set():
                await client.collect("go on", sampling=Sampling(max_tokens=3, ignore_eos=True))
                answered += 1

    async def step(ca=None):
        """Replaces files of all, in no particular order, and waits until all have seen it."""
        seen = {name: changes(process) for name, process in secure.fleet.processes.items()}
        for role in everyone:
            if ca is None:
                new.issue(folder, role, "127.0.0.1")
            else:
                replace(secure.files[role].ca, ca)
        for name, process in secure.fleet.processes.items():
            await until(lambda process=process, name=name: changes(process) > seen[name])
        before = answered
        await until(lambda: answered >= before + 3 or asking.done())

    def changes(process):
        return process.log().count("they have changed")

    asking = asyncio.create_task(ask_on())
    try:
        await until(lambda: answered or asking.done())
        async with secure.client() as client:
            long = client.generate("x", sampling=Sampling(max_tokens=600, ignore_eos=True))
            tokens = aiter(long)
            first = await anext(tokens)
            await step(old + new.pem)
            await step()
            await step(new.pem)
            rest = [delta async for delta in tokens]
        assert sum(len(delta.token_ids) for delta in (first, *rest)) == 600
    finally:
        done.set()
        await asking
    # Connections made now: whoever still showed or trusted the old CA only would not be let in.
    await asyncio.to_thread(secure.fleet.kill_one, "prefill-0")
    await asyncio.to_thread(secure.fleet.restart, "prefill-0")
    await until(lambda: secure.http("/ready")[0] == 200)
    async with secure.client() as client:
        answer = await client.collect("x", sampling=Sampling(max_tokens=3, ignore_eos=True))
    assert len(answer.token_ids) == 3


async def until(condition):
    """Waits for what other processes do."""
    deadline = time.monotonic() + RELOADED_WITHIN_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
