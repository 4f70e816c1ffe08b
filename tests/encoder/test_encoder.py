"""The whole way of an image inside one process: real model, real worker process, real memory."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from transformers import AutoImageProcessor, Qwen2VLForConditionalGeneration

from epd.encoding.embedding_maker import EmbeddingMaker
from epd.encoding.encode_batcher import EncodeJob, EncodeOutcome
from epd.encoding.encode_events import ImageInput, ImagePlanned
from epd.errors import (
    InvalidRequestError,
)
from tests.encoder.calls import Caller
from tests.encoder.conftest import MakeEncoder
from tests.encoder.pictures import encoded, picture, png_bomb
from tests.encoder.watched import Watched, file, memory, until


async def test_embeddings_equal_the_whole_model_of_transformers(
    make_encoder: MakeEncoder, caller: Caller, model_folder: Path
) -> None:
    model = Qwen2VLForConditionalGeneration.from_pretrained(model_folder).eval()
    processor = AutoImageProcessor.from_pretrained(model_folder)
    pictures = [picture(112, 112), picture(300, 90, 1), picture(57, 400, 2), picture(20, 20, 3)]
    encoder = await make_encoder()
    answer = await caller.encode(encoder, *(encoded(one, "PNG") for one in pictures))
    for index, one in enumerate(pictures):
        inputs = processor(images=[one], return_tensors="pt")
        with torch.no_grad():
            expected = model.get_image_features(**inputs).pooler_output[0]
        planned = answer.planned[index]
        embedding = encoder.embedding(planned.handle.handle_id)
        assert tuple(embedding.shape) == tuple(expected.shape) == planned.handle.spec.shape
        torch.testing.assert_close(embedding, expected, rtol=1e-5, atol=1e-5)
        assert planned.handle.spec.plan.grid == tuple(inputs["image_grid_thw"][0].tolist())
        stages = {stage.name: stage for stage in answer.ready[index].stages}
        assert stages["encode"].start_ns >= stages["preprocess"].end_ns


async def test_all_images_are_planned_in_order_before_any_is_encoded(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched
) -> None:
    encoder = await make_encoder(watched)
    async with aclosing(encoder.encode(caller.images([file(0), file(1)]))) as events:
        planned = [await anext(events), await anext(events)]
        assert not watched.calls
    assert [one.image_index for one in planned if isinstance(one, ImagePlanned)] == [0, 1]


async def test_wrong_digest_is_refused(make_encoder: MakeEncoder, caller: Caller) -> None:
    encoder = await make_encoder()
    good = await caller.encode(encoder, file(0))
    stolen = caller.images([file(0)])[0].digest
    for digest in (stolen, b"", b"short"):
        with pytest.raises(InvalidRequestError) as caught:
            async for _ in encoder.encode([ImageInput(5, digest, file(1))]):
                pass
        assert caught.value.field == "images[5].digest"
    assert encoder.stats().open_leases == len(good.handle_ids)


async def test_bad_calls_are_refused_and_hold_nothing(
    make_encoder: MakeEncoder, caller: Caller
) -> None:
    encoder = await make_encoder(max_images=2)
    idle = memory(encoder.stats())
    for files in ([], [file(0)] * 3, [file(0), b""], [file(0), png_bomb()], [b"text", file(0)]):
        with pytest.raises(InvalidRequestError):
            await caller.encode(encoder, *files)
        assert encoder.stats().open_leases == 0
        assert memory(encoder.stats()) == idle


async def test_images_of_several_calls_share_forward_passes(
    make_encoder: MakeEncoder, caller: Caller, watched: Watched, submitted: list[EncodeJob]
) -> None:
    watched.gate.clear()
    encoder = await make_encoder(watched, max_batch=4)
    calls = [asyncio.create_task(caller.encode(encoder, file(seed))) for seed in range(7)]
    await until(lambda: len(submitted) == 7)
    watched.gate.set()
    await asyncio.gather(*calls)
    assert sum(watched.calls) == 7
    assert max(watched.calls) > 1
    assert max(watched.calls) <= 4


async def test_an_image_whose_outcome_is_told_does_not_count_as_running(
    make_encoder: MakeEncoder, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[int] = []
    deliver = EmbeddingMaker._deliver

    def noted(maker: EmbeddingMaker, outcomes: Sequence[EncodeOutcome]) -> None:
        running.append(maker.batcher.running_images)
        deliver(maker, outcomes)

    monkeypatch.setattr(EmbeddingMaker, "_deliver", noted)
    encoder = await make_encoder()
    await caller.encode(encoder, file(0))
    assert running == [0]
