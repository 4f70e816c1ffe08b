"""The HTTP server by itself: probes, bounds on bodies and connections, and being off."""

import asyncio
import contextlib
import json

import pytest

from epd.config import ConfigError
from epd.errors import EpdError
from epd.telemetry.prometheus import parse
from tests.router.harness import router, running


async def exchange(address, data, timeout_s=20.0):
    """Sends bytes as they are; the whole answer as (status, head, body)."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), timeout_s)
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode(), body


def get(path):
    return f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()


def post(body, length=None):
    size = len(body) if length is None else length
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-length: {size}\r\n\r\n"
    )
    return head.encode() + body


def error_of(body):
    return json.loads(body)["error"]


@pytest.fixture
async def strict_router(model, fleet):
    async with running(*fleet.workers), router(model, fleet.workers, model_name="m") as served:
        yield served.http


async def test_probes_tell_whether_requests_are_welcome(model, fleet):
    settings = {"metrics_port": "0"}
    alone = {"worker_wait_s": "0.1", "decodes": "127.0.0.1:1", **settings}
    few = [fleet.encoder, fleet.prefill]
    async with running(*few), router(model, few, **alone) as served:
        assert (await exchange(served.http, get("/health")))[0] == 200
        status, _, body = await exchange(served.http, get("/ready"))
        assert (status, body) == (503, b"no workers")
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        assert (await exchange(served.http, get("/ready")))[0] == 200
        await exchange(served.http, post(b"{}"))
        status, _, body = await exchange(served.http, get("/metrics"))
        assert status == 200
        name = "http_server_request_duration_seconds_count"
        assert parse(body.decode()).total(name, http_response_status_code="400") == 1
        await served.server.fail("broken")
        assert (await exchange(served.http, get("/health")))[0] == 503
        assert (await exchange(served.http, get("/ready")))[0] == 503


async def test_bodies_are_bounded_in_size_time_and_shape(model, fleet):
    async with (
        running(*fleet.workers),
        router(model, fleet.workers, http_body_bytes="1000", http_body_timeout_s="2") as served,
    ):
        status, _, body = await exchange(served.http, post(b"x" * 2000))
        assert (status, error_of(body)["code"]) == (413, "body_too_large")
        status, _, body = await exchange(served.http, post(b"{", length=10))
        assert (status, error_of(body)["code"]) == (408, "slow_body")
        for text in (b"{", b"[" * 900, b'"\xff"'):
            status, _, body = await exchange(served.http, post(text))
            assert (status, error_of(body)["code"]) == (400, "not_json")
        status, _, body = await exchange(served.http, post(b"[]"))
        assert (status, error_of(body)["type"]) == (400, "invalid_request_error")
        status, _, body = await exchange(served.http, get("/v1/chat/completions"))
        assert status == 405
        assert error_of(body)["code"] == "no_such_endpoint"
        assert (await exchange(served.http, get("/nothing")))[0] == 404
        assert fleet.prefill.calls["Prefill"] == 0


async def test_a_connection_that_sends_no_request_ends_and_its_place_is_free(model, fleet):
    async def dripping(begin: bytes, drop: bytes) -> None:
        """Sends forever, bit by bit, until the connection is closed."""
        reader, writer = await asyncio.open_connection(*served.http.rsplit(":", 1))
        writer.write(begin)
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(drop)
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1000), 0.1)
        writer.close()

    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
    async with (
        running(*fleet.workers),
        router(
            model,
            fleet.workers,
            http_connections="4",
            http_head_timeout_s="1",
            http_body_bytes="10",
        ) as served,
        asyncio.timeout(30),
    ):
        await asyncio.gather(
            dripping(b"", b""),  # nothing at all
            dripping(head, b"x: y\r\n"),  # a head without end
            # the rest of a body whose request is refused
            dripping(head + b"content-length: 100000\r\n\r\n" + b" " * 20, b" "),
        )
        assert (await exchange(served.http, get("/health")))[0] == 200


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        # Half of a surrogate pair, which Python's JSON takes, as an escape and as bytes.
        ("messages", rb'[{"role": "user", "content": "\ud800"}]', "not_json"),
        ("messages", b'[{"role": "user", "content": "\xed\xa0\x80"}]', "not_json"),
        ("\\udfff", b"1", "not_json"),
        ("temperature", b"1" + b"0" * 400, "invalid_request"),
        ("max_tokens", b"4294967296", "invalid_request"),
        ("top_k", b"1" + b"0" * 30, "invalid_request"),
        ("logit_bias", b'{"' + b"9" * 5000 + b'": 1}', "invalid_request"),
        (
            "messages",
            '[{"role": "user", "content": [{"type": "image_url", "image_url": '
            '{"url": "data:image/png;base64,\u00e9"}}]}]'.encode(),
            "invalid_request",
        ),
    ],
)
async def test_values_that_no_message_can_carry_are_the_clients_mistake(
    strict_router, field, value, code
):
    fields = {"model": b'"m"', "messages": b'[{"role": "user", "content": "x"}]'}
    fields[field] = value
    body = b", ".join(b'"%s": %s' % (name.encode(), text) for name, text in fields.items())
    status, _, answer = await exchange(strict_router, post(b"{" + body + b"}"))
    assert (status, error_of(answer)["code"]) == (400, code)


async def test_a_pair_of_surrogate_escapes_is_one_character(strict_router):
    body = rb'{"model": "m", "messages": [{"role": "user", "content": "\ud83d\ude00"}]}'
    assert (await exchange(strict_router, post(body)))[0] == 200


async def test_bodies_that_together_are_too_large_are_refused_and_forgotten(model, fleet):
    async with (
        running(*fleet.workers),
        router(model, fleet.workers, http_live_body_bytes="1500") as served,
    ):
        held = asyncio.create_task(exchange(served.http, post(b" " * 1000, length=1100)))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(20):
            while (found := await exchange(served.http, post(b" " * 1000)))[0] != 429:
                await asyncio.sleep(0.05)
        assert error_of(found[2])["type"] == "rate_limit_error"
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        async with asyncio.timeout(20):  # what the client that went away had sent counts no more
            while (await exchange(served.http, post(b" " * 1000)))[0] == 429:
                await asyncio.sleep(0.05)


async def test_one_connection_too_many_is_told_so(model, fleet):
    async with (
        running(*fleet.workers),
        router(model, fleet.workers, http_connections="2") as served,
    ):
        host, port = served.http.rsplit(":", 1)
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        assert (await exchange(served.http, get("/health")))[0] == 503
        for _, writer in idle:
            writer.close()


async def test_http_may_be_off_and_a_taken_port_is_told(model, fleet):
    async with running(*fleet.workers):
        async with router(model, fleet.workers, http_port="-1") as served:
            assert served.http == ""
        async with router(model, fleet.workers) as served:
            port = served.http.rsplit(":", 1)[1]
            with pytest.raises((ConfigError, EpdError), match="cannot listen"):
                async with router(model, fleet.workers, http_port=port):
                    pass
