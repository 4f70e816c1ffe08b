"""What the engine is asked to do and what it answers. Plain Python, no torch."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epd.errors import EpdError
from epd.sampling import FinishReason as FinishReason
from epd.sampling import SamplingParams as SamplingParams
from epd.sampling import TopLogprobs as TopLogprobs

if TYPE_CHECKING:
    from epd.engine.grammar import Matcher
    from epd.engine.image_gate import ImageGate
    from epd.engine.kv_arrival import KvArrival


class RequestMode(enum.Enum):
    """Which part of a request this engine does."""

    #: Prefill and decode here (unified worker, local prefill).
    FULL = "full"
    #: Prefill and the first token only; the KV stays in place until :meth:`Engine.release`.
    PREFILL_ONLY = "prefill_only"
    #: The KV of all ``token_ids`` is in ``block_ids``, already or soon (``EngineRequest.arrival``),
    #: and the first token is drawn.
    PREFILLED = "prefilled"


@dataclass(frozen=True)
class PromptImage:
    """One image's run of placeholder tokens.

    ``offset`` and ``length`` count tokens of ``EngineRequest.token_ids``; ``grid`` is (temporal,
    height, width) in patches before merging, None where it is not known (decode); ``digest`` is the
    32-byte content digest that block hashes cover.
    """

    offset: int
    length: int
    digest: bytes
    grid: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class EngineRequest:
    """A submission.

    Blocks: a FULL request's are freed when it ends. A PREFILLED one's are the engine's from submit
    on (when submit raises they stay the caller's). A PREFILL_ONLY one's may be read by a transfer,
    so they stay in place, however the request ends, until the one ``Engine.release`` that its
    owner must call.

    ``token_ids`` holds the prompt with placeholders expanded, then ``emitted_count`` tokens that an
    earlier attempt already emitted: they count as output for limits and sampling positions.
    ``embeddings`` holds one tensor per image, [embedding tokens, hidden]; the caller keeps the
    memory valid until the first token's or the last event.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    mode: RequestMode = RequestMode.FULL
    emitted_count: int = 0
    images: tuple[PromptImage, ...] = ()
    embeddings: tuple[Any, ...] = ()
    position_delta: int = 0
    #: Holds back images whose embeddings are still being written; None where all are in place.
    gate: "ImageGate | None" = None
    #: PREFILLED only: blocks that hold the KV of token_ids; the engine owns them from submit on.
    block_ids: tuple[int, ...] = ()
    #: PREFILLED only: the token prefill has drawn. It is input here, never emitted again.
    first_token: int | None = None
    #: PREFILLED only: the KV is still on its way. The blocks stay the caller's until it calls
    #: :meth:`Engine.sealed`, and in place until then or the last event; no token comes before.
    arrival: "KvArrival | None" = None
    #: From :meth:`Engine.compile`, over the emitted tokens; set exactly when the sampling has a
    #: constraint. The engine's from submit on.
    matcher: "Matcher | None" = None


@dataclass(frozen=True)
class Admitted:
    """The request has entered the running set after ``queue_ns`` of waiting.

    ``cached_tokens``: prompt tokens whose KV was found in the prefix cache. ``early``: whether a
    step begun before the KV was complete was in time; None without one.
    """

    queue_ns: int
    cached_tokens: int = 0
    early: bool | None = None


@dataclass(frozen=True)
class PrefillDone:
    """The first token is drawn and the KV of all prompt tokens is in ``block_ids``.

    ``forward_ns`` runs from the first chunk's start to the token; ``forward_ended_ns`` is the
    monotonic clock at its end, to tell hidden from exposed push time.
    """

    token_id: int
    logprob: float
    finish_reason: FinishReason | None
    cached_tokens: int
    forward_ns: int
    forward_ended_ns: int
    block_ids: tuple[int, ...]
    top_logprobs: TopLogprobs | None = None


@dataclass(frozen=True)
class NewTokens:
    """Tokens drawn since the last event, in order, with log probabilities before filters.

    ``top_logprobs``: one per token when asked for, else none.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The request ended by itself. ``completion_tokens`` counts replayed and first tokens too.

    ``prefill_ns`` runs from the first chunk's start to the first token (0 when PREFILLED),
    ``decode_ns`` from there (PREFILLED: from admission) to the end.
    """

    reason: FinishReason
    completion_tokens: int
    cached_tokens: int
    prefill_ns: int
    decode_ns: int


@dataclass(frozen=True)
class Preempted:
    """The request lost its blocks; everything of it is freed here. Replay it."""


@dataclass(frozen=True)
class Failed:
    """The request ended with an error (RequestCancelledError after a cancel)."""

    error: EpdError


#: What ``deliver`` receives. The last event of a request is Finished, Preempted or Failed; in
#: PREFILL_ONLY mode it is PrefillDone or Failed.
EngineEvent = Admitted | PrefillDone | NewTokens | Finished | Preempted | Failed


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for load reports and metrics.

    ``waiting_tokens`` are prompt tokens not yet computed; ``held_requests`` have ended but keep
    their blocks until they are released; ``headroom_blocks`` are free blocks that running requests
    will grow into. Prefix-cache queries and hits count prompt tokens; ``early_steps`` are those
    begun before a request's KV was complete, ``early_committed`` gave a token, ``early_late`` came
    to a layer that was not there. Everything from ``prefix_cache_queries`` to ``early_late`` only
    ever grows.
    """

    running_requests: int
    waiting_requests: int
    held_requests: int
    waiting_tokens: int
    total_blocks: int
    free_blocks: int
    quarantined_blocks: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int
    steps: int
    prompt_tokens: int
    output_tokens: int
    early_steps: int
    early_committed: int
    early_late: int
    headroom_blocks: int


@dataclass(frozen=True)
class LayerProgress:
    """KV of one request that a step makes final, for the layer hook.

    Tokens [computed_before, computed_after) of the prompt are new in ``block_ids``; tokens before
    ``computed_before`` are final in every layer. ``cached_tokens`` of them came from the prefix
    cache. ``prompt_len`` is the number of tokens whose KV will exist in all.
    """

    request_id: str
    block_ids: tuple[int, ...]
    computed_before: int
    computed_after: int
    prompt_len: int
    cached_tokens: int
