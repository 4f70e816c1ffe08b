"""The fields of chat and completion requests that say how tokens are drawn and when to end."""

import secrets
from typing import Any

from epd.errors import InvalidRequestError
from epd.sampling import SamplingParams
from services.router.http.fields import Fields
from services.router.http.response_format import read_constraint

#: Seeds fit a signed 64-bit number, which is what many clients can write.
_SEED_BITS = 63
#: Of a token id.
_MAX_ID_DIGITS = 10


def read_sampling(fields: Fields, *, max_tokens: int, top_logprobs: int) -> SamplingParams:
    """Takes all sampling fields, OpenAI's and those that vLLM and SGLang added to them.

    Args:
        fields: Of the request.
        max_tokens: The limit, already read: its name differs between endpoints.
        top_logprobs: Likewise.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    seed = fields.integer("seed")
    given: dict[str, Any] = {
        # OpenAI's default; the gRPC interface is greedy by default.
        "temperature": _or(fields.number("temperature"), 1.0),
        "top_p": fields.number("top_p"),
        "top_k": _top_k(fields.integer("top_k")),
        "min_p": fields.number("min_p"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "presence_penalty": fields.number("presence_penalty"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "min_tokens": fields.integer("min_tokens"),
        "max_tokens": max_tokens,
        "top_logprobs": top_logprobs,
    }
    params = SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        seed=secrets.randbits(_SEED_BITS) if seed is None else seed & (2**64 - 1),
        stop_token_ids=_token_ids(fields, "stop_token_ids"),
        ignore_eos=fields.flag("ignore_eos"),
        logit_bias=_logit_bias(fields),
        constraint=read_constraint(fields),
    )
    params.validate()
    return params


def read_stop(fields: Fields) -> tuple[str, ...]:
    """One stop string or several."""
    value = fields.take("stop")
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("expected a string or an array of strings", field="stop")
    return tuple(texts)


def read_choice_count(fields: Fields, max_choices: int) -> int:
    """How many answers are wanted.

    Raises:
        InvalidRequestError: none, or more than allowed.
    """
    count = fields.integer("n")
    if count is None:
        return 1
    if not 1 <= count <= max_choices:
        raise InvalidRequestError(f"n is {count}, allowed is 1 to {max_choices}", field="n")
    return count


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _top_k(value: int | None) -> int | None:
    return 0 if value == -1 else value  # vLLM's way to say all


def _token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    values = fields.items(name)
    for value in values:
        # The wire has 32 bits; whether the model knows the token is the engine's to say.
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
            raise InvalidRequestError("expected token ids", field=name)
    return tuple(values)


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    given = fields.object("logit_bias")
    if given is None:
        return ()
    bias: dict[int, float] = {}
    for key in list(given):
        if not key.isdecimal() or len(key) > _MAX_ID_DIGITS or int(key) >= 2**32:
            raise InvalidRequestError(f"{key[:32]!r} is no token id", field="logit_bias")
        value = given.number(key)
        assert value is not None
        bias[int(key)] = value
    return tuple(sorted(bias.items()))
