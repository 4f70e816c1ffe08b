"""What the router does with videos: it passes them on whole, or says why not."""

import base64
import json
import shutil
from typing import Any

import openai
import pytest

from epd.image_digest import video_digest
from epd.media import Video
from epd.v1 import common_pb2, router_pb2
from epd.wire.media import video_from_proto
from tests.router.fake_workers import FakeDecode
from tests.router.harness import failure, request, router, running
from tests.support.answer import collect
from tests.support.openai_client import openai_client

VIDEO = Video((b"one", b"two"), (0.0, 0.5))


@pytest.fixture
def model_with_videos(model, tmp_path):
    """The image token stands for videos too, since the fakes know no other anchor."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["video_token_id"] = config["image_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(
        template.replace("== 'image'", "in ('image', 'video')")
    )
    return folder


def about(video, images=(), **fields):
    asked = request("hello", images, **fields)
    part = router_pb2.ContentPart(
        video=common_pb2.Video(frames=video.frames, timestamps_s=video.timestamps_s)
    )
    asked.conversation.messages[0].parts.insert(len(images), part)
    return asked


async def test_a_video_goes_to_one_encoder_whole_and_by_its_digest(model_with_videos, fleet):
    async with (
        running(*fleet.workers),
        router(model_with_videos, fleet.workers) as served,
    ):
        await collect(served.stub.Generate(about(VIDEO, [b"image"])))
    image, video = fleet.encoder.requests[0].images
    assert (image.data, image.HasField("video")) == (b"image", False)
    assert (video.data, video_from_proto(video.video)) == (b"", VIDEO)
    info = fleet.encoder.info
    assert video.digest == video_digest(info.model_digest, info.processor_digest, VIDEO)


async def test_a_unified_worker_gets_a_video_at_its_anchor(model_with_videos):
    worker = FakeDecode(unified=True)
    async with (
        running(worker),
        router(model_with_videos, [worker], disaggregation_mode="null") as served,
    ):
        await collect(served.stub.Generate(about(VIDEO)))
    (image,) = worker.requests[0].local.images
    assert (image.data, video_from_proto(image.video)) == (b"", VIDEO)


@pytest.mark.parametrize(
    ("video", "text"),
    [
        (Video((b"one",) * 5, (0, 1, 2, 3, 4)), "5 frames, allowed are 1 to 4"),
        (Video((b"one", b"two"), (1.0, 0.5)), "a timestamp per frame"),
        (Video((b"one", b""), (0.0, 0.5)), "0 bytes"),
    ],
)
async def test_a_malformed_video_never_leaves_the_router(model_with_videos, fleet, video, text):
    async with (
        running(*fleet.workers),
        router(model_with_videos, fleet.workers, max_video_frames="4") as served,
    ):
        error = await failure(served.stub.Generate(about(video)))
    assert error.code().name == "INVALID_ARGUMENT"
    assert text in (error.details() or "")
    assert fleet.encoder.requests == []


def frames_url(*frames):
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(one).decode() for one in frames)


async def chat(served, video_url, **fields):
    part: Any = {"type": "video_url", "video_url": video_url}
    async with openai_client(served.http) as client:
        return await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": [part]}],
            max_tokens=4,
            extra_body=fields,
        )


URL = frames_url(*VIDEO.frames)
TIMES: list[tuple[dict[str, Any], dict[str, Any], tuple[float, ...]]] = [
    ({}, {}, (0.0, 1.0)),
    ({"fps": 2}, {}, (0.0, 0.5)),
    ({"timestamps_s": [1, 2.5]}, {}, (1.0, 2.5)),
    ({}, {"fps": 4, "frames_indices": [8, 10], "num_frames": -1, "duration": 3.0}, (2.0, 2.5)),
    ({"fps": 2}, {"fps": 4, "frames_indices": [8, 10, 12]}, (0.0, 0.5)),
]


async def test_frames_come_over_http_with_the_times_that_the_client_gives(model_with_videos, fleet):
    async with (
        running(*fleet.workers),
        router(model_with_videos, fleet.workers, model_name="m") as served,
    ):
        for said, media_io, expected in TIMES:
            fields = {"media_io_kwargs": {"video": media_io}} if media_io else {}
            await chat(served, {"url": URL, **said}, **fields)
            (image,) = fleet.encoder.requests[-1].images
            assert video_from_proto(image.video) == Video(VIDEO.frames, expected)


PART = "messages[0].content[0].video_url"
BAD_HTTP = [
    ({"url": "data:video/mp4;base64,AAAA"}, {}, f"{PART}.url", "video_format_unsupported"),
    ({"url": "https://example.org/a.mp4"}, {}, f"{PART}.url", "video_format_unsupported"),
    ({"url": frames_url(*[b"x"] * 5)}, {}, f"{PART}.url", "video_frames"),
    ({"url": URL + "?"}, {}, f"{PART}.url", "invalid_request"),
    ({"url": URL, "fps": 0}, {}, f"{PART}.fps", "invalid_request"),
    ({"url": URL, "fps": 1, "timestamps_s": [0, 1]}, {}, f"{PART}.timestamps_s", "invalid_request"),
    ({"url": URL, "timestamps_s": [0]}, {}, f"{PART}.timestamps_s", "video_timestamps"),
    ({"url": URL, "timestamps_s": [1, 0]}, {}, f"{PART}.timestamps_s", "video_timestamps"),
    ({"url": URL, "timestamps_s": [0, 10**400]}, {}, f"{PART}.timestamps_s", "invalid_request"),
    ({"url": URL, "start": 1}, {}, f"{PART}.start", "unsupported_field"),
    (
        {"url": URL},
        {"video": {"frames_indices": [3]}},
        "media_io_kwargs.video.frames_indices",
        "video_timestamps",
    ),
    (
        {"url": URL},
        {"video": {"num_frames": 8}},
        "media_io_kwargs.video.num_frames",
        "unsupported_value",
    ),
    ({"url": URL}, {"image": {}}, "media_io_kwargs.image", "unsupported_field"),
]


async def test_a_video_that_http_does_not_take_is_refused_naming_the_field(
    model_with_videos, fleet
):
    async with (
        running(*fleet.workers),
        router(model_with_videos, fleet.workers, model_name="m", max_video_frames="4") as served,
    ):
        for video_url, media_io, param, code in BAD_HTTP:
            with pytest.raises(openai.BadRequestError) as refused:
                await chat(served, video_url, **({"media_io_kwargs": media_io} if media_io else {}))
            assert (refused.value.param, refused.value.code) == (param, code)
    assert fleet.encoder.requests == []


async def test_a_model_without_a_video_token_takes_no_videos(model, fleet):
    async with (
        running(*fleet.workers),
        router(model, fleet.workers, model_name="m") as served,
    ):
        error = await failure(served.stub.Generate(about(VIDEO)))
        assert error.code().name == "UNIMPLEMENTED"
        assert "no video token" in (error.details() or "")
        with pytest.raises(openai.BadRequestError, match="no video token") as refused:
            await chat(served, {"url": URL})
        assert refused.value.param == PART
    assert fleet.encoder.requests == []
