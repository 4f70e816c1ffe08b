"""What the router does with videos: it passes them on whole, or says why not."""

import json
import shutil

import openai
import pytest

from epd.image_digest import video_digest
from epd.media import Video
from epd.v1 import common_pb2, router_pb2
from epd.wire.media import video_from_proto
from tests.router.fake_workers import FakeDecode
from tests.router.harness import collect, failure, request, router, running

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
    assert text in error.details()
    assert fleet.encoder.requests == []


async def test_a_model_without_a_video_token_and_http_take_no_videos(model, fleet):
    async with (
        running(*fleet.workers),
        router(model, fleet.workers, model_name="m") as served,
    ):
        error = await failure(served.stub.Generate(about(VIDEO)))
        assert error.code().name == "UNIMPLEMENTED"
        assert "no video token" in error.details()
        async with openai.AsyncOpenAI(
            base_url=f"http://{served.http}/v1", api_key="unused", max_retries=0
        ) as client:
            part = {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": [part]}]
                )
            assert refused.value.param == "messages[0].content[0].type"
    assert fleet.encoder.requests == []
