"""What a Decode call may ask for, and images on their way into a prompt."""

import pytest

from epd.engine.families.base import ImagePlan
from epd.errors import InvalidRequestError
from epd.v1 import decode_pb2
from services.decode.expansion import expand_images
from services.decode.request import job_from_proto

TRANSFER_ID = "0123456789abcdef" * 2
DIGEST = b"d" * 32
PAD = 9


def local_request(token_ids, anchors, **fields):
    images = [decode_pb2.LocalImage(anchor_index=n, digest=DIGEST) for n in anchors]
    return decode_pb2.DecodeRequest(
        request_id="r",
        token_ids=token_ids,
        local=decode_pb2.LocalPrefill(images=images),
        **fields,
    )


def plan(length):
    return ImagePlan((1, 2, 2 * length), PAD, (PAD,) * length, 1 - length, length)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"token_ids": [1]}, "source"),
        ({"token_ids": [], "transfer_id": TRANSFER_ID}, "token_ids"),
        ({"token_ids": [1], "emitted_count": 1, "transfer_id": TRANSFER_ID}, "token_ids"),
        ({"token_ids": [1], "transfer_id": "7"}, "transfer_id"),
        ({"token_ids": [1], "transfer_id": TRANSFER_ID.upper()}, "transfer_id"),
        (
            {
                "token_ids": [1, 2],
                "transfer_id": TRANSFER_ID,
                "images": [decode_pb2.PromptImageDigest(offset=1, length=2, digest=DIGEST)],
            },
            "images[0].offset",
        ),
        (
            {
                "token_ids": [1, 2],
                "transfer_id": TRANSFER_ID,
                "images": [decode_pb2.PromptImageDigest(offset=0, length=1, digest=b"short")],
            },
            "images[0].digest",
        ),
    ],
)
def test_a_wrong_field_is_named(fields, path):
    with pytest.raises(InvalidRequestError) as refusal:
        job_from_proto(decode_pb2.DecodeRequest(request_id="r", **fields))
    assert refusal.value.field == path


@pytest.mark.parametrize("anchors", [[3], [1, 1], [2, 1]])
def test_anchors_outside_the_prompt_or_out_of_order_are_refused(anchors):
    with pytest.raises(InvalidRequestError, match="anchor"):
        job_from_proto(local_request([1, PAD, PAD], anchors))


def test_each_anchor_becomes_its_images_placeholders_and_replayed_tokens_stay_last():
    job = job_from_proto(local_request([1, PAD, 2, PAD, 3, 7], [1, 3], emitted_count=1))
    assert job.local_images is not None
    prompt = expand_images(job, job.local_images, [plan(2), plan(3)])
    assert prompt.token_ids == (1, PAD, PAD, 2, PAD, PAD, PAD, 3, 7)
    assert [(image.offset, image.length) for image in prompt.images] == [(1, 2), (4, 3)]
    assert prompt.position_delta == -3


def test_an_image_where_no_anchor_stands_is_refused():
    job = job_from_proto(local_request([1, 5, 2], [1]))
    assert job.local_images is not None
    with pytest.raises(InvalidRequestError) as refusal:
        expand_images(job, job.local_images, [plan(2)])
    assert refusal.value.field == "local.images[0].anchor_index"
