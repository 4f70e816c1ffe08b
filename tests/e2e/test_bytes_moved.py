"""What moves, and which way: bytes counted by the transfer library, messages without tensors."""

import asyncio

import pytest

from epd.handover.seal import SEAL_BYTES
from epd.image_digest import image_digest
from epd.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    encoder_pb2,
    encoder_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from epd.wire.kv_layout import layout_from_proto
from tests.encoder.pictures import encoded, picture
from tests.support.ask import ask, generate_request, greedy
from tests.support.questions import make_questions
from tests.support.reference import Question

pytestmark = pytest.mark.timeout(600)

KV_BYTES = "epd_kv_transfer_io_bytes_total"
KV_COUNT = "epd_kv_transfer_duration_seconds_count"
EMBEDDING_BYTES = "epd_embedding_transfer_io_bytes_total"
#: Far below any embedding or KV of the requests here, far above what handles need.
LARGEST_MESSAGE = 8 * 1024
HIDDEN_BYTES = 128 * 4


async def worker_info(channel):
    return await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())


async def scrape_at_rest(fleet, name):
    """Metrics once nothing is counted any more."""
    await asyncio.to_thread(fleet.idle_level)
    last = await asyncio.to_thread(fleet.scrape, name)
    while True:
        await asyncio.sleep(1.0)
        now = await asyncio.to_thread(fleet.scrape, name)
        if all(now.total(metric) == last.total(metric) for metric in (KV_COUNT, EMBEDDING_BYTES)):
            return now
        last = now


async def scrape_after(fleet, name, before, pushes):
    """Metrics once so many pushes more are counted: an answer ends before its push is."""
    async with asyncio.timeout(30):
        while True:
            now = await asyncio.to_thread(fleet.scrape, name)
            if now.total(KV_COUNT) >= before.total(KV_COUNT) + pushes:
                return now
            await asyncio.sleep(0.05)


async def test_bytes_moved_are_the_uncached_blocks_of_all_layers_the_seals_and_the_embeddings(
    model, shared_fleets, open_channel
):
    fleet = shared_fleets.get(model)
    layout = layout_from_proto(
        (await worker_info(open_channel(fleet.process("decode-0").address))).kv_layout
    )
    before = await scrape_at_rest(fleet, "prefill-0")
    channel = open_channel(fleet.router_address)
    kv_bytes = embedding_bytes = 0
    # Distinct from the first block on, so that nothing is found in a cache.
    questions = [
        Question(question.images, f"{index:03d} of 901: {question.text}")
        for index, question in enumerate(make_questions(10, seed=31))
    ]
    for question in questions:
        usage = (await ask(channel, generate_request(question, greedy(4)))).completion.usage
        assert usage.cached_tokens == 0
        blocks = layout.blocks_for(usage.prompt_tokens)
        kv_bytes += blocks * layout.block_bytes * layout.layer_count + SEAL_BYTES
        embedding_bytes += usage.image_tokens * HIDDEN_BYTES
    after = await scrape_after(fleet, "prefill-0", before, len(questions))
    assert after.total(KV_BYTES) - before.total(KV_BYTES) == kv_bytes
    assert after.total(KV_COUNT) - before.total(KV_COUNT) == len(questions)
    assert after.total(EMBEDDING_BYTES) - before.total(EMBEDDING_BYTES) == embedding_bytes

    # Asked again, decode holds all full blocks already, whichever of the two calls comes first:
    # left are the last block and the seal.
    for _ in range(2):
        before = after
        usage = (await ask(channel, generate_request(questions[3], greedy(4)))).completion.usage
        after = await scrape_after(fleet, "prefill-0", before, 1)
        blocks = layout.blocks_for(usage.prompt_tokens)
        left = blocks - usage.prompt_tokens // layout.block_size
        assert blocks > 30 > left
        moved = after.total(KV_BYTES) - before.total(KV_BYTES)
        assert moved == left * layout.block_bytes * layout.layer_count + SEAL_BYTES


async def test_no_message_between_the_services_holds_a_tensor(model, shared_fleets, open_channel):
    fleet = shared_fleets.get(model)
    encoder, prefill, decode = (
        open_channel(fleet.process(f"{role}-0").address)
        for role in ("encoder", "prefill", "decode")
    )
    image = encoded(picture(224, 224), "PNG")
    sizes: dict[str, int] = {}

    def note(message):
        name = type(message).__name__
        sizes[name] = max(sizes.get(name, 0), message.ByteSize())
        return message

    info = await worker_info(encoder)
    digest = image_digest(info.model_digest, info.processor_digest, image)
    images = [encoder_pb2.EncodeImage(image_index=0, digest=digest, data=image)]
    encode = encoder_pb2_grpc.EncoderServiceStub(encoder).Encode(
        encoder_pb2.EncodeRequest(request_id="r", images=images), timeout=120
    )
    events = [note(event) async for event in encode]
    planned = events[0].planned
    assert planned.handle.byte_count == len(planned.placeholder_ids) * HIDDEN_BYTES > 4096

    text = list(range(65, 91)) * 40
    token_ids = [*planned.placeholder_ids, *text]
    sampling = common_pb2.SamplingParams(max_tokens=8, ignore_eos=True)
    transfer_id = "0123456789abcdef" * 2
    decoding = decode_pb2_grpc.DecodeServiceStub(decode).Decode(
        decode_pb2.DecodeRequest(
            request_id="r",
            token_ids=token_ids,
            images=[
                decode_pb2.PromptImageDigest(
                    offset=0, length=len(planned.placeholder_ids), digest=digest
                )
            ],
            position_delta=planned.position_delta,
            sampling=sampling,
            transfer_id=transfer_id,
        ),
        timeout=120,
    )
    request = note(
        prefill_pb2.PrefillRequest(
            request_id="r",
            transfer_id=transfer_id,
            token_ids=token_ids,
            images=[
                prefill_pb2.PromptImage(
                    offset=0,
                    length=len(planned.placeholder_ids),
                    grid=planned.grid,
                    digest=digest,
                    handle=planned.handle,
                )
            ],
            position_delta=planned.position_delta,
            sampling=sampling,
            decode=prefill_pb2.DecodeTarget(
                address=fleet.process("decode-0").address,
                instance_id=(await worker_info(decode)).instance_id,
            ),
        )
    )
    async for event in prefill_pb2_grpc.PrefillServiceStub(prefill).Prefill(request, timeout=120):
        note(event)
    pushed = event.pushed
    tokens = 0
    async for event in decoding:
        note(event)
        tokens += len(event.tokens.token_ids)
    assert tokens == 7
    assert pushed.byte_count > 1024 * 1024
    assert max(sizes.values()) < LARGEST_MESSAGE, sizes
