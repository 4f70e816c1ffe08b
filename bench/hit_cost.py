"""What a cache hit of the encoder costs beyond a plain RPC to the same process."""

import time

import grpc

from bench.harness import Sample
from epd.image_digest import image_digest
from epd.v1 import encoder_pb2, encoder_pb2_grpc, worker_pb2, worker_pb2_grpc


def measure_hits(address: str, image: bytes, calls: int) -> list[Sample]:
    """Milliseconds of an Encode that hits, to the end of its stream, and of an empty Release.

    They take turns over one channel. The embedding is encoded before the first one is measured.
    """
    with grpc.insecure_channel(address) as channel:
        encoder = encoder_pb2_grpc.EncoderServiceStub(channel)
        info = worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())
        digest = image_digest(info.model_digest, info.processor_digest, image)
        request = encoder_pb2.EncodeRequest(
            images=[encoder_pb2.EncodeImage(digest=digest, data=image)]
        )
        _encode(encoder, request)
        samples = []
        for number in range(calls):
            started = time.perf_counter()
            encoder.Release(encoder_pb2.ReleaseRequest())
            plain = time.perf_counter() - started
            elapsed, was_hit = _encode(encoder, request)
            assert was_hit, "the embedding should have stayed in the cache"
            samples.append(Sample("plain", number, 0, plain * 1e3))
            samples.append(Sample("hit", number, 0, elapsed * 1e3))
        return samples


def _encode(
    encoder: encoder_pb2_grpc.EncoderServiceStub, request: encoder_pb2.EncodeRequest
) -> tuple[float, bool]:
    """Seconds of the call and whether it hit; its handle is given back afterwards."""
    started = time.perf_counter()
    responses = list(encoder.Encode(request))
    elapsed = time.perf_counter() - started
    planned = next(one.planned for one in responses if one.HasField("planned"))
    encoder.Release(encoder_pb2.ReleaseRequest(handle_ids=[planned.handle.handle_id], settled=True))
    return elapsed, planned.cache_hit
