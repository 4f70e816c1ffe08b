"""What the engine knows about one request while it lives. Plain Python."""

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from epd.engine.drawn_token import DrawnToken
from epd.engine.requests import EngineRequest, FinishReason, RequestMode
from epd.engine.token_history import TokenHistory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class SequenceState(enum.IntEnum):
    """Stages of a request in the engine, in order; from HELD on nothing is computed for it."""

    WAITING = 0
    RUNNING = 1
    #: Ended, but a transfer may still read its blocks.
    HELD = 2
    ENDED = 3


@dataclass(eq=False)
class Sequence:
    """A request with its tokens and blocks. Touched by the engine thread only."""

    request: EngineRequest
    arrived_ns: int
    token_ids: list[int] = field(init=False)
    state: SequenceState = SequenceState.WAITING
    block_ids: list[int] = field(init=False)
    #: Tokens whose KV is in the blocks.
    computed_len: int = 0
    #: Prompt tokens whose KV was found in the prefix cache.
    cached_len: int = 0
    #: Hashes of the leading full blocks, as far as they were needed.
    hashes: list[bytes] = field(default_factory=list)
    admitted_ns: int = 0
    prefill_started_ns: int = 0
    prefill_ended_ns: int = 0
    #: What the request's grammar lets follow, a bit per token; None without a grammar.
    allowed: "npt.NDArray[np.int32] | None" = None
    #: Whether a step begun before the KV was complete was in time; None without one.
    early: bool | None = None
    #: What that step has drawn, until the KV is complete.
    early_token: DrawnToken | None = None
    #: The KV is on its way and the leading blocks are the caller's.
    arriving: bool = field(init=False)
    _history: TokenHistory | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)
        self.block_ids = list(self.request.block_ids)
        if self.request.first_token is not None:
            self.computed_len = len(self.token_ids)
            self.token_ids.append(self.request.first_token)
        self.arriving = self.request.arrival is not None

    @property
    def request_id(self) -> str:
        """Id given by the caller, unique among live requests."""
        return self.request.request_id

    @property
    def mode(self) -> RequestMode:
        """Which part of the request is done here."""
        return self.request.mode

    @property
    def prompt_len(self) -> int:
        """Tokens of the submission, replayed output included."""
        return len(self.request.token_ids)

    @property
    def output_len(self) -> int:
        """Output tokens so far, replayed and first ones included."""
        return self.request.emitted_count + len(self.token_ids) - self.prompt_len

    def history(self) -> TokenHistory | None:
        """What penalties count, up to now; None when this request has none."""
        sampling = self.request.sampling
        if not (sampling.counts_output or sampling.repetition_penalty != 1.0):
            return None
        first_output = self.prompt_len - self.request.emitted_count
        if self._history is None:
            self._history = TokenHistory(self.token_ids[:first_output])
        self._history.catch_up(self.token_ids[first_output:])
        return self._history

    @property
    def remaining_len(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.token_ids) - self.computed_len

    @property
    def is_prefilling(self) -> bool:
        """Whether KV of the prompt is still missing."""
        return self.computed_len < self.prompt_len

    @property
    def lacks_images(self) -> bool:
        """Whether its prompt cannot be computed to the end yet."""
        gate, length = self.request.gate, len(self.token_ids)
        return gate is not None and gate.end(self.computed_len, length) < length

    @property
    def grows(self) -> bool:
        """Whether it takes more blocks as it goes on."""
        return self.mode is not RequestMode.PREFILL_ONLY

    @property
    def own_blocks(self) -> list[int]:
        """Blocks that the engine must free in the end."""
        return self.block_ids[len(self.request.block_ids) :] if self.arriving else self.block_ids

    def drop_embeddings(self) -> None:
        """The prompt is computed: the images' embeddings may go."""
        if self.request.embeddings:
            self.request = replace(self.request, embeddings=())

    def ending_tokens(self, end_token_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end this output, given the model's own."""
        sampling = self.request.sampling
        own = frozenset() if sampling.ignore_eos else end_token_ids
        return own.union(sampling.stop_token_ids)

    def finish_reason(self, end_token_ids: frozenset[int], max_context: int) -> FinishReason | None:
        """Why the last token ends the output, None when it does not."""
        if self.token_ids[-1] in self.ending_tokens(end_token_ids):
            return FinishReason.STOP
        if self.output_len >= self.request.sampling.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.LENGTH if len(self.token_ids) >= max_context else None
