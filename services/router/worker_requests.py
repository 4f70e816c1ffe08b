"""Requests to prefill and decode workers."""

from epd.v1 import decode_pb2, prefill_pb2
from epd.wire.media import media_fields
from epd.wire.sampling import sampling_to_proto
from services.router.anchor_tokens import AnchorTokens
from services.router.attempt import Work
from services.router.placeholders import ExpandedPrompt
from services.router.workers import Worker


def prefill_request(
    work: Work, expanded: ExpandedPrompt, transfer_id: str, decode: Worker
) -> prefill_pb2.PrefillRequest:
    """A Prefill that pushes to ``decode``; replayed tokens follow the prompt."""
    return prefill_pb2.PrefillRequest(
        request_id=work.request_id,
        transfer_id=transfer_id,
        token_ids=[*expanded.token_ids, *work.emitted],
        emitted_count=len(work.emitted),
        images=[
            prefill_pb2.PromptImage(
                offset=image.offset,
                length=image.length,
                grid=image.plan.grid,
                digest=_digest(work, image.plan.index),
                handle=image.plan.handle,
                pending=image.pending,
            )
            for image in expanded.images
        ],
        position_delta=expanded.position_delta,
        sampling=sampling_to_proto(work.sampling),
        decode=prefill_pb2.DecodeTarget(
            address=decode.address, instance_id=decode.info.instance_id
        ),
    )


def decode_request(
    work: Work, expanded: ExpandedPrompt, transfer_id: str
) -> decode_pb2.DecodeRequest:
    """A Decode whose KV arrives under ``transfer_id``."""
    return decode_pb2.DecodeRequest(
        request_id=work.request_id,
        token_ids=[*expanded.token_ids, *work.emitted],
        emitted_count=len(work.emitted),
        images=[
            decode_pb2.PromptImageDigest(
                offset=image.offset, length=image.length, digest=_digest(work, image.plan.index)
            )
            for image in expanded.images
        ],
        position_delta=expanded.position_delta,
        sampling=sampling_to_proto(work.sampling),
        transfer_id=transfer_id,
    )


def local_request(work: Work, anchor_tokens: AnchorTokens) -> decode_pb2.DecodeRequest:
    """A Decode that a unified worker serves alone, from the unexpanded prompt.

    Raises:
        UnsupportedFeatureError: images, but the model folder does not name their anchor token.
        InvalidRequestError: there are more or fewer anchors than images.
    """
    images = work.prompt.images
    anchors = anchor_tokens.places(work.prompt.token_ids, [image.data for image in images])
    return decode_pb2.DecodeRequest(
        request_id=work.request_id,
        token_ids=[*work.prompt.token_ids, *work.emitted],
        emitted_count=len(work.emitted),
        sampling=sampling_to_proto(work.sampling),
        local=decode_pb2.LocalPrefill(
            images=[
                decode_pb2.LocalImage(
                    anchor_index=anchor,
                    digest=image.digest,
                    **media_fields(image.data),
                )
                for anchor, image in zip(anchors, images, strict=True)
            ]
        ),
    )


def _digest(work: Work, image_index: int) -> bytes:
    return work.prompt.images[image_index].digest
