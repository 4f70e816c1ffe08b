"""The parts of a prompt that prefill and decode requests share, with their checks.

The router has checked what the client sent; these checks keep a wrong caller from reaching the
engine, whose own assertions would take the worker down.
"""

import re
from collections.abc import Iterable, Sequence

from epd.engine.requests import PromptImage
from epd.errors import InvalidRequestError
from epd.v1 import common_pb2

DIGEST_BYTES = 32
_TRANSFER_ID = re.compile(r"[0-9a-f]{32}")


def checked_transfer_id(transfer_id: str) -> str:
    """The id when it is 128 bits in lower-case hexadecimal.

    Raises:
        InvalidRequestError: it is anything else.
    """
    if not _TRANSFER_ID.fullmatch(transfer_id):
        raise InvalidRequestError(
            f"transfer_id has {len(transfer_id)} characters, wanted are 32 hexadecimal digits",
            field="transfer_id",
        )
    return transfer_id


def checked_token_ids(token_ids: Sequence[int], emitted_count: int) -> tuple[int, ...]:
    """Prompt and replayed tokens; at least one token must be prompt.

    Raises:
        InvalidRequestError: there is no prompt token.
    """
    if emitted_count >= len(token_ids):
        raise InvalidRequestError(
            f"{len(token_ids)} tokens, {emitted_count} of them replayed, leave no prompt",
            field="token_ids",
        )
    return tuple(token_ids)


def checked_digest(digest: bytes, field: str) -> bytes:
    """A content digest of 32 bytes.

    Raises:
        InvalidRequestError: it has another length.
    """
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequestError(
            f"a digest has {DIGEST_BYTES} bytes, this one {len(digest)}", field=field
        )
    return digest


def grid_from_proto(message: common_pb2.ImageGrid) -> tuple[int, int, int]:
    """Patches before merging: temporal, height, width."""
    return message.temporal, message.height, message.width


def check_image_runs(images: Iterable[PromptImage], token_count: int) -> None:
    """Image runs must rise, not touch each other's tokens and lie inside the prompt.

    Raises:
        InvalidRequestError: names the first run that does not.
    """
    free_from = 0
    for index, image in enumerate(images):
        end = image.offset + image.length
        if image.length < 1 or image.offset < free_from or end > token_count:
            raise InvalidRequestError(
                f"tokens {image.offset} to {end} are no room for an image: the prompt has "
                f"{token_count} tokens and {free_from} are before this image",
                field=f"images[{index}].offset",
            )
        free_from = end
