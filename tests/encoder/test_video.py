"""Videos as frames: the pixels, the cache and the limits."""

import dataclasses
import io
import json
import shutil
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from epd.encoding.encode_events import ImageInput, ImagePlanned
from epd.encoding.encoder import Encoder
from epd.encoding.preprocess import PreprocessPool
from epd.encoding.preprocess_config import PreprocessConfig
from epd.engine.families.base import ModelFamily
from epd.engine.families.registry import load_family
from epd.errors import EpdError, InvalidRequestError, UnsupportedFeatureError
from epd.image_digest import image_digest, media_digest, video_digest
from epd.media import Video
from tests.encoder.conftest import MakeEncoder
from tests.encoder.record_video import RECORDED, VIDEOS, frames_of
from tests.support.video_reference import process_video


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def video(name: str) -> Video:
    frames = tuple(map(png, frames_of(name)))
    return Video(frames, tuple(0.5 * n for n in range(len(frames))))


@pytest.mark.parametrize("name", list(VIDEOS))
async def test_pixels_and_grid_are_those_of_transformers_video_processor(
    name: str, model_folder: Path, family: ModelFamily
) -> None:
    recorded = np.load(RECORDED)
    one = video(name)
    pool = PreprocessPool(PreprocessConfig(model_folder))
    await pool.start()
    try:
        plan = family.plan_video_from_size(one.timestamps_s, *frames_of(name)[0].size)
        made = await pool.process(one, "video", frames=family.frame_settings(plan.grid))
    finally:
        await pool.stop()
    pixels = family.pixel_input(made.arrays)
    assert pixels.grid == tuple(recorded[f"{name}_grid"])
    processor = family._processor  # type: ignore[attr-defined]
    mean, std = (np.repeat(v, 2 * 14 * 14) for v in (processor.image_mean, processor.image_std))
    levels = (pixels.patches * std + mean) * 255
    # Resized by another library's bicubic filter, which shows at the hard edges of these frames.
    apart = np.abs(levels - recorded[f"{name}_levels"])
    assert apart.mean() < 0.05
    assert (apart > 1.5).mean() < 0.005
    reference, grid = process_video(processor, one.frames)
    assert pixels.grid == grid
    np.testing.assert_allclose(pixels.patches, reference.numpy(), atol=1e-5)


@pytest.mark.parametrize("frames", [1, 2, 3, 6])
def test_the_place_of_a_video_is_known_from_its_size(family: ModelFamily, frames: int) -> None:
    plan = family.plan_video_from_size(range(frames), 120, 70)
    picture = family.plan_from_size(120, 70)
    assert plan.grid == (-(-frames // 2), *picture.grid[1:])
    assert (
        plan.embedding_tokens
        == len(plan.placeholder_ids)
        == plan.grid[0] * len(picture.placeholder_ids)
    )
    assert set(plan.placeholder_ids) == {plan.anchor_token_id} == {family.video_token_id}
    assert plan.position_delta == max(picture.grid[1:]) // 2 - plan.embedding_tokens


def test_frames_are_sized_by_the_folders_video_settings(
    tmp_path: Path, model_folder: Path, family: ModelFamily
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    settings = {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}}
    path = folder / "video_preprocessor_config.json"
    path.write_text(json.dumps(settings))
    found = load_family(folder)
    assert found.plan_video_from_size((0, 1), 200, 200).grid == (1, 4, 4)
    assert found.plan_from_size(200, 200).grid == family.plan_from_size(200, 200).grid
    assert found.processor_digest != family.processor_digest
    # As qwen-vl-utils does it: all frames share a budget of tokens.
    capped = {"cap_pixels_per_frame": True, "max_video_tokens": 4}
    path.write_text(json.dumps({**settings, **capped}))
    assert load_family(folder).plan_video_from_size(range(8), 200, 200).grid == (4, 2, 2)


def test_the_digest_covers_frames_their_order_and_their_times() -> None:
    frames, times = (b"a", b"bc"), (0.0, 1.0)
    digests = {
        video_digest("m", "p", Video(frames, times)),
        video_digest("m", "p", Video((b"ab", b"c"), times)),
        video_digest("m", "p", Video((b"bc", b"a"), times)),
        video_digest("m", "p", Video(frames, (0.0, 2.0))),
        video_digest("m", "q", Video(frames, times)),
        video_digest("m", "p", Video((b"abc",), (0.0,))),
        image_digest("m", "p", b"abc"),
    }
    assert len(digests) == 7


def asked(one: Video | bytes, family: ModelFamily, digest_of_model: str) -> ImageInput:
    return ImageInput(0, media_digest(digest_of_model, family.processor_digest, one), one)


async def planned(encoder: Encoder, image: ImageInput) -> tuple[ImagePlanned, torch.Tensor]:
    found = None
    async with aclosing(encoder.encode([image])) as events:
        async for event in events:
            found = event if isinstance(event, ImagePlanned) else found
    assert found is not None
    embedding = encoder.embedding(found.handle.handle_id).clone()
    encoder.release([found.handle.handle_id], settled=True)
    return found, embedding


async def test_a_video_is_encoded_once_and_found_by_its_content(
    make_encoder: MakeEncoder, family: ModelFamily, digest_of_model: str
) -> None:
    encoder = await make_encoder()
    one = video("odd")
    first, embedding = await planned(encoder, asked(one, family, digest_of_model))
    again, same = await planned(encoder, asked(video("odd"), family, digest_of_model))
    assert (first.cache_hit, again.cache_hit) == (False, True)
    assert torch.equal(embedding, same)
    assert embedding.shape == (len(first.handle.spec.plan.placeholder_ids), family.hidden_size)
    later = dataclasses.replace(one, timestamps_s=(0.0, 1.0, 2.0))
    other, _ = await planned(encoder, asked(later, family, digest_of_model))
    assert not other.cache_hit


FRAME = png(Image.new("RGB", (60, 60), "red"))
RICH = png(frames_of("odd")[0])
WIDE = png(Image.new("RGB", (90, 60), "red"))


BAD = [
    (Video((), ()), "images[0].video.frames", "VIDEO_FRAMES"),
    (Video((FRAME,) * 5, (0, 1, 2, 3, 4)), "images[0].video.frames", "VIDEO_FRAMES"),
    (Video((FRAME,) * 2, (0.0,)), "images[0].video.timestamps_s", "VIDEO_TIMESTAMPS"),
    (Video((FRAME,) * 2, (1.0, 1.0)), "images[0].video.timestamps_s", "VIDEO_TIMESTAMPS"),
    (Video((FRAME,) * 2, (-1.0, 1.0)), "images[0].video.timestamps_s", "VIDEO_TIMESTAMPS"),
    (
        Video((FRAME,) * 2, (0.0, float("nan"))),
        "images[0].video.timestamps_s",
        "VIDEO_TIMESTAMPS",
    ),
    (Video((FRAME, WIDE), (0.0, 1.0)), "images[0].video.frames[1]", "VIDEO_FRAME_SIZE"),
    (Video((FRAME, b"no"), (0.0, 1.0)), "images[0].video.frames[1]", "IMAGE_UNREADABLE"),
    (Video((WIDE,) * 4, (0, 1, 2, 3)), "images[0].video", "VIDEO_TOO_LARGE"),
    (Video((RICH, RICH[: len(RICH) // 2]), (0.0, 1.0)), "images[0]", "IMAGE_UNREADABLE"),
]


async def test_a_bad_video_is_refused_naming_what_is_wrong(
    make_encoder: MakeEncoder, family: ModelFamily, digest_of_model: str
) -> None:
    encoder = await make_encoder(max_video_frames=4, max_video_pixels=20_000)
    for bad, field, reason in BAD:
        with pytest.raises(InvalidRequestError) as refused:
            await planned(encoder, asked(bad, family, digest_of_model))
        assert (refused.value.field, refused.value.reason) == (field, reason)


def test_a_model_whose_vocabulary_has_no_video_token_takes_no_videos(
    tmp_path: Path, model_folder: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["video_token_id"] = 151656
    (folder / "config.json").write_text(json.dumps(config))
    family = load_family(folder)
    refusals: list[EpdError] = []
    for call in (
        lambda: family.plan_video((1, 4, 4)),
        lambda: family.plan_video_from_size((0, 1), 60, 60),
        lambda: family.frame_settings((1, 4, 4)),
    ):
        with pytest.raises(UnsupportedFeatureError, match="no video token") as refused:
            call()
        refusals.append(refused.value)
    assert {one.reason for one in refusals} == {"VIDEO_UNSUPPORTED"}
