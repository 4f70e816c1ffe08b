"""Sampling parameters on the wire."""

from typing import Any

from epd.errors import InvalidRequestError
from epd.sampling import Constraint, ConstraintKind, SamplingParams
from epd.v1 import common_pb2

_OPTIONAL = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "top_logprobs",
    "choice",
)


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """The parameters of a wire message; what is absent there takes the dataclass's default.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    given: dict[str, Any] = {
        name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)
    }
    params = SamplingParams(
        **given,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        constraint=_constraint_from_proto(message),
    )
    params.validate()
    return params


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """The wire form with every field set, so that both ends use the same values."""
    return common_pb2.SamplingParams(
        **{name: getattr(params, name) for name in _OPTIONAL},
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logit_bias=dict(params.logit_bias),
        constraint=constraint_to_proto(params.constraint),
    )


def constraint_to_proto(constraint: Constraint | None) -> common_pb2.Constraint | None:
    """The wire form; None stays absent."""
    if constraint is None:
        return None
    return common_pb2.Constraint(**{constraint.kind.value: constraint.text})


def _constraint_from_proto(message: common_pb2.SamplingParams) -> Constraint | None:
    if not message.HasField("constraint"):
        return None
    name = message.constraint.WhichOneof("grammar")
    if name is None:
        raise InvalidRequestError("no grammar is set", field="sampling.constraint")
    return Constraint(ConstraintKind(name), getattr(message.constraint, name))
