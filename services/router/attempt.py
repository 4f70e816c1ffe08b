"""What every try of a request has in common, whatever workers it runs on."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from epd.sampling import FinishReason, SamplingParams, TopLogprobs
from services.router.critical_path import CriticalPath
from services.router.deadline import Deadline
from services.router.prompt import Prompt

#: Takes new tokens, their log probabilities and, when asked for, the likeliest tokens at their
#: places; True when a stop string has ended the answer.
TokenSink = Callable[[Sequence[int], Sequence[float], Sequence[TopLogprobs]], Awaitable[bool]]


@dataclass
class Work:
    """A request in execution. ``emitted`` holds all tokens of the answer; the sink fills it."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    deadline: Deadline
    path: CriticalPath
    sink: TokenSink
    emitted: list[int] = field(default_factory=list)
    #: Instances that failed this request; others are preferred.
    avoid: set[str] = field(default_factory=set)
    #: Prompt tokens with placeholders; known once the images are planned.
    prompt_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int | None = None

    def cached(self, tokens: int) -> None:
        """Notes prefix-cache hits of the first attempt; later ones would count replayed tokens."""
        if self.cached_tokens is None:
            self.cached_tokens = tokens


#: How an attempt ended: a reason, or None when the request was preempted and must be replayed.
Outcome = FinishReason | None
