"""What a Prefill call may ask for."""

import pytest

from epd.errors import InvalidRequestError
from epd.transfer.base import AgentDescriptor
from epd.v1 import common_pb2, prefill_pb2
from services.prefill.request import job_from_proto

AGENTS = [AgentDescriptor("i", "prefill.i", "nixl", b"")]


def asked(**handle):
    """A prompt with one image of four tokens, and what is said of its embedding."""
    fields = {
        "handle_id": "h",
        "agents": [common_pb2.AgentDescriptor(agent_name="encoder.e", transport="nixl")],
        "digest": b"d" * 32,
        "segments": [common_pb2.Segment(address=1 << 20, length=128)],
        "byte_count": 128,
        "shape": [4, 8],
        "dtype": "float32",
        "lease_ms": 1000,
        "encoder_address": "127.0.0.1:1",
    }
    image = prefill_pb2.PromptImage(
        offset=1,
        length=4,
        grid=common_pb2.ImageGrid(temporal=1, height=4, width=4),
        digest=b"d" * 32,
        handle=common_pb2.EmbeddingHandle(**{**fields, **handle}),
    )
    return prefill_pb2.PrefillRequest(
        request_id="r",
        transfer_id="0123456789abcdef" * 2,
        token_ids=[1, 9, 9, 9, 9, 2],
        images=[image],
        decode=prefill_pb2.DecodeTarget(address="127.0.0.1:2", instance_id="i"),
    )


def test_a_handle_is_taken_with_its_image():
    job = job_from_proto(asked(), AGENTS)
    assert (job.handles[0].digest, job.images[0].length) == (b"d" * 32, 4)


@pytest.mark.parametrize(
    ("handle", "path"),
    [
        ({"digest": b"e" * 32}, "digest"),
        ({"digest": b""}, "digest"),
        ({"byte_count": 64}, "byte_count"),
        ({"segments": [common_pb2.Segment(address=1 << 63, length=128)]}, "segments"),
        ({"encoder_address": "nowhere"}, "encoder_address"),
        ({"lease_ms": 0}, "lease_ms"),
        ({"lease_ms": 49}, "lease_ms"),
    ],
)
def test_a_handle_that_cannot_be_the_images_is_refused_by_name(handle, path):
    """Read under another image's digest, the KV would be served to everybody who sends that one."""
    with pytest.raises(InvalidRequestError) as refusal:
        job_from_proto(asked(**handle), AGENTS)
    assert refusal.value.field == f"images[0].handle.{path}"
