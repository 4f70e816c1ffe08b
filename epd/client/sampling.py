"""How a client wants tokens drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epd.sampling import Constraint
from epd.v1 import common_pb2
from epd.wire.sampling import constraint_to_proto


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. None takes the router's default (greedy, 256 tokens, random seed)."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    #: Added to the logits of these tokens.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    #: How many of the likeliest tokens each delta tells per token.
    top_logprobs: int | None = None
    #: What the whole output must follow.
    constraint: Constraint | None = None


def sampling_to_proto(sampling: Sampling) -> common_pb2.SamplingParams:
    """The wire form; what is None stays absent."""
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        top_logprobs=sampling.top_logprobs,
        constraint=constraint_to_proto(sampling.constraint),
    )
