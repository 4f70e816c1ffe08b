"""Errors cross the wire with status, reason and details, and come back as what was raised."""

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from epd import errors
from epd.rpc.status import INTERNAL_TEXT, PEER_UNREACHABLE, error_from_rpc, root_error
from epd.v1 import prefill_pb2, prefill_pb2_grpc
from tests.support.rpc_pair import rpc_pair

SERVICE = "epd.v1.PrefillService"


class Raising(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, error):
        self.error = error

    async def Prefill(self, request, context):
        yield prefill_pb2.PrefillResponse(first_token=prefill_pb2.FirstToken(token_id=7))
        raise self.error


async def raised_at_client(monkeypatch, error, request_id="r-1"):
    def add(handlers):
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(Raising(error), handlers)

    async with rpc_pair(monkeypatch, [(SERVICE, add)]) as pair:
        stub = prefill_pb2_grpc.PrefillServiceStub(pair.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Prefill(prefill_pb2.PrefillRequest(request_id=request_id)):
                pass
    return caught.value


def details_of(error):
    found = {}
    for packed in rpc_status.from_call(error).details:
        kind = packed.TypeName().removeprefix("google.rpc.")
        found[kind] = getattr(error_details_pb2, kind)()
        packed.Unpack(found[kind])
    return found


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (errors.InvalidRequestError("too long", field="sampling.top_p"), "BadRequest"),
        (errors.UnsupportedFeatureError("no images"), None),
        (errors.DuplicateRequestError("twice"), None),
        (errors.NotFoundError("no such lease"), "ResourceInfo"),
        (errors.LayoutMismatchError("dtype: a here, b there"), "PreconditionFailure"),
        (errors.ResourceExhaustedError("full", retry_after_s=2.5), "RetryInfo"),
        (errors.UnavailableError("draining", reason="DRAINING"), "RetryInfo"),
        (errors.TransferFailedError("layer 3", metadata={"layer": "3"}), None),
        (errors.DataLossError("checksum"), None),
        (errors.DeadlineExceededError("late"), None),
        (errors.RequestCancelledError("gone"), None),
    ],
)
async def test_each_error_has_its_status_and_comes_back_equal(monkeypatch, error, detail):
    received = await raised_at_client(monkeypatch, error)
    assert received.code().name == error.code
    assert received.details() == error.message
    details = details_of(received)
    assert details["ErrorInfo"].domain == "epd.v1"
    assert details["RequestInfo"].request_id == "r-1"
    assert detail is None or detail in details
    back = error_from_rpc(received)
    assert type(back) is type(error)
    assert vars(back) == vars(error)


async def test_a_bug_shows_a_fixed_text_and_the_request_id_and_its_text_only_in_the_log(
    monkeypatch, caplog
):
    received = await raised_at_client(monkeypatch, KeyError("secret prompt"))
    assert received.code() is grpc.StatusCode.INTERNAL
    assert received.details() == INTERNAL_TEXT
    assert "secret" not in str(received.trailing_metadata())
    assert details_of(received)["RequestInfo"].request_id == "r-1"
    assert "secret prompt" in caplog.text
    assert "r-1" in caplog.text


async def test_a_request_without_id_gets_one_for_the_log(monkeypatch, caplog):
    received = await raised_at_client(monkeypatch, ValueError("x"), request_id="")
    minted = details_of(received)["RequestInfo"].request_id
    assert len(minted) == 32
    assert minted in caplog.text


async def test_the_typed_error_inside_a_task_group_is_the_one_that_counts(monkeypatch):
    group = ExceptionGroup("", [ValueError("x"), errors.NotFoundError("lease")])
    received = await raised_at_client(monkeypatch, group)
    assert received.code() is grpc.StatusCode.NOT_FOUND


def answered(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


async def test_an_uncaught_answer_of_a_peer_is_passed_on():
    inner = answered(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert isinstance(error_from_rpc(inner), errors.ResourceExhaustedError)


async def test_an_unreachable_peer_is_told_apart_from_one_that_refuses():
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Prefill(prefill_pb2.PrefillRequest(), timeout=60).read()
    back = error_from_rpc(caught.value)
    assert isinstance(back, errors.UnavailableError)
    assert back.reason == PEER_UNREACHABLE


def test_codes_of_no_error_class_become_internal():
    inner = answered(grpc.StatusCode.UNKNOWN, "odd")
    assert isinstance(error_from_rpc(inner), errors.InternalError)


def test_details_that_cannot_be_read_say_nothing():
    unreadable = any_pb2.Any(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff")
    status = status_pb2.Status(code=14, message="gone", details=[unreadable])
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    foreign = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, "gone", None
    )
    assert isinstance(error_from_rpc(foreign), errors.UnavailableError)


def test_root_error_of_nested_groups():
    leaf = errors.UnavailableError("x")
    nested = BaseExceptionGroup("", [ExceptionGroup("", [leaf])])
    assert root_error(nested) is leaf
    assert root_error(leaf) is leaf
