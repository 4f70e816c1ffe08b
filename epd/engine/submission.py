"""Checks of a request before it may enter the engine. Plain Python."""

from epd.engine.families.base import ModelFamily
from epd.engine.requests import EngineRequest, RequestMode
from epd.engine.sequence import Sequence
from epd.errors import InvalidRequestError, UnsupportedFeatureError


def check_submission(
    request: EngineRequest, family: ModelFamily, max_context: int, block_size: int
) -> None:
    """Refuses what can never run, so that the engine thread meets no bad input.

    Raises:
        InvalidRequestError: names the field, with both numbers where it is a limit.
        UnsupportedFeatureError: images for a model that takes none.
    """
    request.sampling.validate()
    assert (request.matcher is None) == (request.sampling.constraint is None)
    # An early step's token must not move a grammar on, and would need it to.
    assert request.arrival is None or request.matcher is None
    _check_endings(request, family)
    _check_tokens(request, family.vocab_size, max_context)
    _check_images(request, family)
    if request.mode is RequestMode.PREFILLED:
        _check_prefilled(request, family, max_context, block_size)
    elif request.block_ids or request.first_token is not None:
        raise InvalidRequestError(
            f"blocks and a first token go with prefilled requests, not with {request.mode.value}",
            field="block_ids",
        )


def _check_endings(request: EngineRequest, family: ModelFamily) -> None:
    """Before min_tokens no ending token may be drawn, so some token must be left."""
    sampling = request.sampling
    unknown = [token for token in sampling.stop_token_ids if not 0 <= token < family.vocab_size]
    if unknown:
        raise InvalidRequestError(
            f"stop token {unknown[0]} is none of the model's 0 to {family.vocab_size - 1}",
            field="sampling.stop_token_ids",
        )
    unknown = [token for token, _ in sampling.logit_bias if not 0 <= token < family.vocab_size]
    if unknown:
        raise InvalidRequestError(
            f"biased token {unknown[0]} is none of the model's 0 to {family.vocab_size - 1}",
            field="sampling.logit_bias",
        )
    endings = Sequence(request, arrived_ns=0).ending_tokens(family.end_token_ids)
    if sampling.min_tokens and len(endings) >= family.vocab_size:
        raise InvalidRequestError(
            f"every token ends the output, so there cannot be {sampling.min_tokens}",
            field="sampling.min_tokens",
        )


def _check_tokens(request: EngineRequest, vocab_size: int, max_context: int) -> None:
    tokens = request.token_ids
    if not tokens:
        raise InvalidRequestError("the prompt is empty", field="token_ids")
    if len(tokens) >= max_context:
        raise InvalidRequestError(
            f"the prompt has {len(tokens)} tokens, the context holds {max_context} "
            "with at least one token of output",
            field="token_ids",
            reason="PROMPT_TOO_LONG",
            metadata={"promptTokens": str(len(tokens)), "contextTokens": str(max_context)},
        )
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise InvalidRequestError(
            f"token ids reach from {min(tokens)} to {max(tokens)}, the model knows 0 to "
            f"{vocab_size - 1}",
            field="token_ids",
        )
    if not 0 <= request.emitted_count < len(tokens):
        raise InvalidRequestError(
            f"{request.emitted_count} of {len(tokens)} tokens cannot be output",
            field="emitted_count",
        )
    if request.emitted_count >= request.sampling.max_tokens:
        raise InvalidRequestError(
            f"{request.emitted_count} tokens are emitted, max_tokens is "
            f"{request.sampling.max_tokens}",
            field="emitted_count",
        )


def _check_images(request: EngineRequest, family: ModelFamily) -> None:
    if request.images and not family.accepts_images:
        raise UnsupportedFeatureError(
            f"the model ({family.name}) takes no images", reason="IMAGES_UNSUPPORTED"
        )
    end = 0
    for image in request.images:
        if not (end <= image.offset and image.length > 0):
            raise InvalidRequestError("images overlap or are out of order", field="images")
        end = image.offset + image.length
    if end > len(request.token_ids):
        raise InvalidRequestError(
            f"an image ends at token {end} of {len(request.token_ids)}", field="images"
        )
    if request.mode is not RequestMode.PREFILLED:
        _check_embeddings(request, family)


def _check_embeddings(request: EngineRequest, family: ModelFamily) -> None:
    if len(request.embeddings) != len(request.images):
        raise InvalidRequestError(
            f"{len(request.images)} images, {len(request.embeddings)} embeddings",
            field="embeddings",
        )
    delta = 0
    for image, embedding in zip(request.images, request.embeddings, strict=True):
        if image.grid is None:
            raise InvalidRequestError("an image without its grid", field="images")
        placed = tuple(request.token_ids[image.offset : image.offset + image.length])
        plan = family.plan_placed(image.grid, placed)
        if placed != plan.placeholder_ids:
            raise InvalidRequestError(
                f"tokens {image.offset} to {image.offset + image.length} are not the "
                f"{len(plan.placeholder_ids)} placeholders of an image of grid {image.grid}",
                field="images",
            )
        expected = (plan.embedding_tokens, family.embedding_features)
        if tuple(embedding.shape) != expected:
            raise InvalidRequestError(
                f"an embedding is {tuple(embedding.shape)}, expected {expected}",
                field="embeddings",
            )
        delta += plan.position_delta
    if delta != request.position_delta:
        raise InvalidRequestError(
            f"position_delta is {request.position_delta}, the images' sum is {delta}",
            field="position_delta",
        )


def _check_prefilled(
    request: EngineRequest, family: ModelFamily, max_context: int, block_size: int
) -> None:
    needed = -(-len(request.token_ids) // block_size)
    if len(request.block_ids) != needed:
        raise InvalidRequestError(
            f"{len(request.token_ids)} tokens need {needed} blocks, {len(request.block_ids)} given",
            field="block_ids",
        )
    if request.first_token is None or not 0 <= request.first_token < family.vocab_size:
        raise InvalidRequestError(
            f"first_token is {request.first_token}, the model knows 0 to {family.vocab_size - 1}",
            field="first_token",
        )
    reason = Sequence(request, arrived_ns=0).finish_reason(family.end_token_ids, max_context)
    if reason is not None:
        raise InvalidRequestError(
            f"the first token already ends the output ({reason.value})", field="first_token"
        )
