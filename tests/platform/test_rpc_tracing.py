"""Spans, metrics and trace context of calls."""

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from epd import errors
from epd.telemetry.prometheus import scrape
from tests.support.rpc_pair import rpc_pair

SERVICE = "epd.v1.EchoService"
ARITIES = ["UnaryUnary", "UnaryStream"]
#: A client makes no span for these: its kept streams belong to no request.
REQUEST_STREAMS = ["StreamUnary", "StreamStream"]
#: Of the calls that have reached the server and hang there: when it takes them for overdue, in
#: monotonic seconds.
hanging: list[float] = []


async def fail_if_asked(message, context):
    if message == b"refuse":
        raise errors.NotFoundError("no")
    if message == b"bug":
        raise ValueError("bug")
    if message == b"hang":
        hanging.append(time.monotonic() + context.time_remaining())
        await asyncio.sleep(60)
    if message == b"metadata":
        return dict(context.invocation_metadata())["traceparent"].encode()
    return message


async def unary_unary(request, context):
    return await fail_if_asked(request, context)


async def unary_stream(request, context):
    yield await fail_if_asked(request, context)


async def stream_unary(requests, context):
    return [await fail_if_asked(request, context) async for request in requests][-1]


async def stream_stream(requests, context):
    async for request in requests:
        yield await fail_if_asked(request, context)


async def writes_by_context(request, context):
    """A stream that is no generator, like grpc's own Health/Watch."""
    await context.write(b"written")


def add_echo(handlers):
    methods = {
        "UnaryUnary": grpc.unary_unary_rpc_method_handler(unary_unary),
        "UnaryStream": grpc.unary_stream_rpc_method_handler(unary_stream),
        "StreamUnary": grpc.stream_unary_rpc_method_handler(stream_unary),
        "StreamStream": grpc.stream_stream_rpc_method_handler(stream_stream),
        "Writes": grpc.unary_stream_rpc_method_handler(writes_by_context),
    }
    handlers.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])


async def call(channel, arity, message, deadline_s=30.0, metadata=None):
    """Sends one message, returns the last response."""

    async def requests():
        yield message

    path = f"/{SERVICE}/{arity}"
    options = {"timeout": deadline_s, "metadata": metadata}
    match arity:
        case "UnaryUnary":
            return await channel.unary_unary(path)(message, **options)
        case "StreamUnary":
            return await channel.stream_unary(path)(requests(), **options)
        case "StreamStream":
            started = channel.stream_stream(path)(requests(), **options)
        case _:
            started = channel.unary_stream(path)(message, **options)
    return [response async for response in started][-1]


def echo_pair(monkeypatch, **options):
    return rpc_pair(monkeypatch, [(SERVICE, add_echo)], **options)


def root_span(pair):
    return pair.client_telemetry.tracer.start_as_current_span("root")


async def spans_of(pair, count):
    """The spans of the only trace, by kind, once ``count`` have arrived."""
    for _ in range(1000):
        await asyncio.to_thread(pair.flush)
        ids = pair.spans.trace_ids()
        if ids and len(pair.spans.spans(ids[0])) >= count:
            break
        await asyncio.sleep(0.02)
    assert len(ids) == 1
    spans = pair.spans.spans(ids[0])
    assert len(spans) == count
    return {span.kind: span for span in spans}


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_call_has_a_client_and_a_server_span_with_current_names(monkeypatch, arity):
    async with echo_pair(monkeypatch) as pair:
        with root_span(pair):
            assert await call(pair.channel, arity, b"hello") == b"hello"
        spans = await spans_of(pair, 3)
        port = int(pair.server.address.split(":")[1])
    server, client, root = spans["SERVER"], spans["CLIENT"], spans["INTERNAL"]
    assert server.parent_id == client.span_id
    assert client.parent_id == root.span_id
    assert (server.service, client.service) == ("epd-decode", "epd-prefill")
    for span in (server, client):
        assert span.name == f"{SERVICE}/{arity}"
        assert span.attributes["rpc.system.name"] == "grpc"
        assert span.attributes["rpc.method"] == span.name
        assert span.attributes["rpc.response.status_code"] == "OK"
        assert "error.type" not in span.attributes
        assert not span.failed
    assert client.attributes["server.address"] == "127.0.0.1"
    assert client.attributes["server.port"] == port


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_refusal_is_an_error_for_the_client_and_an_answer_for_the_server(
    monkeypatch, arity
):
    async with echo_pair(monkeypatch) as pair:
        with root_span(pair), pytest.raises(grpc.aio.AioRpcError):
            await call(pair.channel, arity, b"refuse")
        spans = await spans_of(pair, 3)
    for kind in ("SERVER", "CLIENT"):
        assert spans[kind].attributes["rpc.response.status_code"] == "NOT_FOUND"
    assert not spans["SERVER"].failed
    assert spans["CLIENT"].failed
    assert spans["CLIENT"].attributes["error.type"] == "NOT_FOUND"


@pytest.mark.parametrize("arity", REQUEST_STREAMS)
async def test_a_stream_of_requests_has_a_server_span_under_the_context_it_brings(
    monkeypatch, arity
):
    caller = f"00-{0xA1:032x}-{0xB2:016x}-01"
    async with echo_pair(monkeypatch) as pair:
        metadata = (("traceparent", caller),)
        assert await call(pair.channel, arity, b"hello", metadata=metadata) == b"hello"
        server = (await spans_of(pair, 1))["SERVER"]
    assert server.parent_id == f"{0xB2:016x}"
    assert server.name == f"{SERVICE}/{arity}"


async def test_a_bug_is_an_error_on_both_sides(monkeypatch):
    async with echo_pair(monkeypatch) as pair:
        with root_span(pair), pytest.raises(grpc.aio.AioRpcError):
            await call(pair.channel, "UnaryStream", b"bug")
        spans = await spans_of(pair, 3)
    assert spans["SERVER"].failed
    assert spans["SERVER"].attributes["error.type"] == "INTERNAL"


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_cancelled_call_ends_its_spans_with_the_outcome(monkeypatch, arity):
    hanging.clear()
    async with echo_pair(monkeypatch) as pair:
        with root_span(pair):
            task = asyncio.create_task(call(pair.channel, arity, b"hang"))
            async with asyncio.timeout(20):
                while not hanging:
                    await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        spans = await spans_of(pair, 3)
    assert spans["SERVER"].attributes["epd.outcome"] == "cancelled"
    assert spans["SERVER"].attributes["rpc.response.status_code"] == "CANCELLED"
    assert spans["CLIENT"].attributes["rpc.response.status_code"] == "CANCELLED"


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_missed_deadline_is_told_apart_from_a_cancel(monkeypatch, arity):
    spans = {}
    for _ in range(10):
        hanging.clear()
        async with echo_pair(monkeypatch) as pair:
            due_s = time.monotonic() + 1.5
            with root_span(pair), pytest.raises(grpc.aio.AioRpcError):
                await call(pair.channel, arity, b"hang", deadline_s=1.5)
            # A call's time begins anew where it arrives: one that was long under way cannot be told
            # from a cancelled one, and one that has not arrived at all has no server's span.
            if hanging and hanging[0] < due_s + 0.09:
                spans = await spans_of(pair, 3)
                break
    assert spans["SERVER"].attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
    assert spans["SERVER"].failed
    assert spans["CLIENT"].attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"


async def test_an_unsampled_caller_stays_unsampled_and_nothing_is_exported(monkeypatch):
    caller = SpanContext(0xA1, 0xB2, is_remote=True, trace_flags=TraceFlags(0))
    async with echo_pair(monkeypatch) as pair:
        with use_span(NonRecordingSpan(caller)):
            traceparent = await call(pair.channel, "UnaryStream", b"metadata")
        await asyncio.to_thread(pair.flush)
        assert pair.spans.trace_ids() == []
    version, trace_id, span_id, flags = traceparent.decode().split("-")
    assert (version, flags) == ("00", "00")
    assert int(trace_id, 16) == 0xA1
    assert int(span_id, 16) != 0


async def test_a_worker_begins_no_trace_and_a_router_does(monkeypatch):
    async with echo_pair(monkeypatch) as pair:
        await call(pair.channel, "UnaryUnary", b"hello")
        await asyncio.to_thread(pair.flush)
        assert pair.spans.trace_ids() == []
    async with echo_pair(monkeypatch, starts_traces=True) as pair:
        await call(pair.channel, "UnaryUnary", b"hello")
        spans = await spans_of(pair, 1)
        assert spans["SERVER"].parent_id == ""


async def test_a_stream_that_is_no_generator_is_traced_too(monkeypatch):
    async with echo_pair(monkeypatch, starts_traces=True) as pair:
        assert await call(pair.channel, "Writes", b"") == b"written"
        assert (await spans_of(pair, 1))["SERVER"].name == f"{SERVICE}/Writes"


async def test_health_watch_works_through_the_interceptors_and_is_never_traced(monkeypatch):
    async with echo_pair(monkeypatch, starts_traces=True) as pair:
        with root_span(pair):
            stub = health_pb2_grpc.HealthStub(pair.channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            await pair.server.fail("test")
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
            await stub.Check(health_pb2.HealthCheckRequest())
        assert list(await spans_of(pair, 1)) == ["INTERNAL"]


async def test_durations_of_calls_are_in_the_metrics_of_both_sides(monkeypatch):
    async with echo_pair(monkeypatch, metrics_port=0) as pair:
        for _ in range(3):
            await call(pair.channel, "UnaryUnary", b"hello")
        with pytest.raises(grpc.aio.AioRpcError):
            await call(pair.channel, "UnaryUnary", b"refuse")
        counted = 0.0
        async with asyncio.timeout(20):  # a call is counted after its answer has gone out
            while counted < 8:
                await asyncio.sleep(0.05)
                server = await asyncio.to_thread(scrape, pair.server_telemetry.metrics_address)
                client = await asyncio.to_thread(scrape, pair.client_telemetry.metrics_address)
                counted = server.total("rpc_server_call_duration_seconds_count")
                counted += client.total("rpc_client_call_duration_seconds_count")
    method = f"{SERVICE}/UnaryUnary"
    for scraped, name in ((server, "server"), (client, "client")):
        count = f"rpc_{name}_call_duration_seconds_count"
        assert scraped.total(count, rpc_method=method, rpc_response_status_code="OK") == 3
        assert scraped.total(count, rpc_method=method, rpc_response_status_code="NOT_FOUND") == 1
        assert 'le="0.005"' in scraped.text
