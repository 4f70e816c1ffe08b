"""Requests whose KV has arrived, from the seal to the engine's last event."""

from types import SimpleNamespace
from typing import Any

from opentelemetry.trace import NoOpTracer

from epd.engine.requests import Preempted
from epd.handover.sealed_transfer import SealedTransfer
from epd.v1 import common_pb2, decode_pb2
from services.decode.answer import PromptFacts
from services.decode.remote import RemoteDecoding
from services.decode.request import job_from_proto

TRANSFER_ID = "0" * 32


class FullEngine:
    """Has no place among the running ones and takes the blocks back."""

    def __init__(self):
        self.engine = SimpleNamespace(pool=SimpleNamespace(block_size=8))

    async def matcher(self, sampling, emitted):
        return None

    async def generate(self, request):
        assert request.block_ids == (3,)
        yield Preempted()


class Receiver:
    """Holds one sealed transfer."""

    async def wait_sealed(self, transfer_id, timeout_s):
        return SealedTransfer((3,), 0, 7, -0.5, 100)

    def take(self, transfer_id):
        return (3,)


def test_usage_counts_what_was_found_here_once():
    """By the reservation where KV was received, by the engine where it was computed."""
    received = PromptFacts(prompt_tokens=40, image_tokens=16, cached_tokens=32)
    assert received.usage(0, 5) == common_pb2.Usage(
        prompt_tokens=40, image_tokens=16, cached_tokens=32, completion_tokens=5
    )
    assert PromptFacts(prompt_tokens=40, image_tokens=0).usage(24).cached_tokens == 24


async def test_a_request_preempted_before_it_could_join_is_told_so_and_is_no_bug():
    engine: Any = FullEngine()
    receiver: Any = Receiver()
    remote = RemoteDecoding(engine, receiver, NoOpTracer(), kv_wait_s=1, max_buffered_tokens=8)
    job = job_from_proto(
        decode_pb2.DecodeRequest(
            token_ids=[1, 2, 3],
            sampling=common_pb2.SamplingParams(max_tokens=4),
            transfer_id=TRANSFER_ID,
        )
    )
    events = []

    async def emit(event):
        events.append(event.WhichOneof("event"))

    await remote.run(job, TRANSFER_ID, emit)
    assert events == ["preempted"]
