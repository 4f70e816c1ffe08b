"""What prefill says to a decode worker that has just left its set."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from epd.errors import TransferFailedError, UnavailableError
from epd.rpc.channels import ChannelPool
from epd.rpc.request_context import new_id
from epd.telemetry.setup import start_telemetry
from epd.v1.decode_pb2_grpc import DecodeServiceStub
from services.prefill.decode_control import GrpcDecodeControl
from services.prefill.reserve_calls import ReserveCalls, untraced

ERROR = TransferFailedError("no")
CALLS: dict[str, Callable[[GrpcDecodeControl], Awaitable[object]]] = {
    "announce": lambda control: control.announce(new_id(), 1, 2, 3),
    "renew": lambda control: control.renew([new_id()]),
    "fail": lambda control: control.fail(new_id(), ERROR, True),
    "settle": lambda control: control.settle([new_id()]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_control_call_on_a_closed_channel_fails_as_one_to_a_lost_worker(
    call: Callable[[GrpcDecodeControl], Awaitable[object]],
) -> None:
    """Any other error would end the task that renews and settles for all decode workers."""
    telemetry = start_telemetry("prefill", new_id())
    channels = ChannelPool(telemetry)
    address = "127.0.0.1:9"
    control = GrpcDecodeControl(
        DecodeServiceStub(channels.get(address)), ReserveCalls(5.0, untraced), 5.0
    )
    await channels.close(address)
    async with asyncio.timeout(30):
        with pytest.raises(UnavailableError, match="left the fleet"):
            await call(control)
    telemetry.close()
