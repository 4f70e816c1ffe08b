"""Refuses a request early when it would be late anyway."""

from collections.abc import Sequence

from epd.errors import ResourceExhaustedError
from services.router.pick import uncached_tokens
from services.router.placement import predicted_ttft_s
from services.router.workers import Worker

_MIN_HINT_S = 0.1
_MAX_HINT_S = 60.0


def least_ttft_s(
    prompt_tokens: int,
    hashes: Sequence[bytes],
    images: int,
    encoders: Sequence[Worker],
    prefills: Sequence[Worker],
) -> float:
    """The soonest first token that any worker would probably make, from now on.

    Args:
        prompt_tokens: Of the prompt, image placeholders as far as known.
        hashes: Of its full blocks; empty where images are still to be planned.
        images: How many must be encoded.
        encoders: Those that take requests.
        prefills: Those that take requests.
    """
    encode_s = (
        min(encoder.speed.seconds(encoder.load + images) for encoder in encoders)
        if images and encoders
        else 0.0
    )
    return encode_s + min(
        (
            predicted_ttft_s(
                prefill,
                uncached_tokens(prompt_tokens, prefill.held.leading(hashes), prefill.block_size),
            )
            for prefill in prefills
        ),
        default=0.0,
    )


def check_deadline(predicted_s: float, budget_s: float, *, queued: bool) -> None:
    """Refuses a request whose first token would come too late.

    Only where something is ahead of it: a request that finds nothing waiting is always let in, and
    its own time corrects a prediction that was wrong. So a refusal can never feed on itself.

    Raises:
        ResourceExhaustedError: it would be late; the hint is when the queue will be short enough.
    """
    if queued and predicted_s > budget_s:
        raise ResourceExhaustedError(
            f"the first token is expected in {predicted_s:.2f} s and due in {budget_s:.2f} s",
            reason="DEADLINE_UNREACHABLE",
            retry_after_s=min(max(predicted_s - budget_s, _MIN_HINT_S), _MAX_HINT_S),
        )
