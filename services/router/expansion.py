"""A request's prompt with its images' placeholders, and how many of them there usually are."""

from epd.errors import InvalidRequestError
from services.router.attempt import Work
from services.router.encode_stage import EncodedImages
from services.router.placeholders import ExpandedPrompt, expand
from services.router.registry import WorkerRegistry
from services.router.workers import Role

#: Weight of the newest request in the mean of tokens per image.
_FADE = 0.1


def text_only(work: Work) -> ExpandedPrompt:
    """The prompt as it is, an anchor token for each image."""
    return ExpandedPrompt(work.prompt.token_ids, (), 0)


class Expander:
    """Expands prompts, within the context of the served model.

    Args:
        registry: Knows the model.
    """

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry
        self._tokens_per_image = 0.0

    def expand(self, work: Work, encoded: EncodedImages) -> ExpandedPrompt:
        """The prompt, whose images are all planned; notes its length on ``work``."""
        plans = encoded.in_order()
        expanded = expand(work.prompt.token_ids, plans, encoded.pending)
        if plans:
            self._tokens_per_image += _FADE * (
                expanded.image_tokens / len(plans) - self._tokens_per_image
            )
        work.prompt_tokens = len(expanded.token_ids)
        work.image_tokens = expanded.image_tokens
        return expanded

    def expected_tokens(self, work: Work) -> int:
        """Length of a prompt whose images are not planned yet."""
        return len(work.prompt.token_ids) + int(len(work.prompt.images) * self._tokens_per_image)

    def check_length(self, expanded: ExpandedPrompt) -> None:
        """Raises InvalidRequestError when the context has no room for an answer.

        While no worker is there nothing is known of it: one is waited for, and checks too.
        """
        if not any(self._registry.available(role) for role in Role):
            return
        prompt_tokens = len(expanded.token_ids)
        context_length = self._registry.model().context_length
        if prompt_tokens >= context_length:
            raise InvalidRequestError(
                f"the prompt has {prompt_tokens} tokens and the context {context_length}, of which "
                "at least one must be left for the answer",
                field="input",
                reason="PROMPT_TOO_LONG",
                metadata={
                    "promptTokens": str(prompt_tokens),
                    "contextLength": str(context_length),
                },
            )
