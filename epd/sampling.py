"""How tokens are drawn and why an output ends: what router and engine both know. Plain Python."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from epd.errors import InvalidRequestError


class FinishReason(enum.Enum):
    """Why an output ended by itself."""

    STOP = "stop"
    LENGTH = "length"


#: The wire has 32 bits for counts of tokens.
_MAX_COUNT = 2**32 - 1
#: Most alternatives that are reported per token.
MAX_TOP_LOGPROBS = 20


class TopLogprobs(NamedTuple):
    """The likeliest tokens of one position, likeliest first, with their log probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class ConstraintKind(enum.Enum):
    """In which language a constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


@dataclass(frozen=True)
class Constraint:
    """What the whole output must follow."""

    kind: ConstraintKind
    text: str


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn; defaults equal the proto's.

    Repetition counts tokens of prompt and output, as transformers does; frequency and presence
    count tokens of the output only, as OpenAI does. Tokens emitted by an earlier attempt are
    output. ``choice`` tells several answers to one request apart: it is part of the generator's
    key.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    #: Added to the logits of these tokens.
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0
    choice: int = 0
    constraint: Constraint | None = None

    @property
    def counts_output(self) -> bool:
        """Whether tokens of the output make themselves more or less likely."""
        return bool(self.frequency_penalty or self.presence_penalty)

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed by more than temperature and filters."""
        return self.counts_output or self.repetition_penalty != 1.0 or bool(self.logit_bias)

    def validate(self) -> None:
        """Checks the ranges.

        Raises:
            InvalidRequestError: names the field, its value and the range.
        """
        for name, value, good, allowed in self._checks():
            if not good:  # NaN fails every comparison, so it is refused too
                raise InvalidRequestError(
                    f"{name} is {value}, allowed is {allowed}", field=f"sampling.{name}"
                )

    def _checks(self) -> Iterator[tuple[str, float, bool, str]]:
        yield from (
            ("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "0 to 100"),
            ("top_k", self.top_k, 0 <= self.top_k <= _MAX_COUNT, f"0 to {_MAX_COUNT}"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "0 to 1"),
            (
                "max_tokens",
                self.max_tokens,
                1 <= self.max_tokens <= _MAX_COUNT,
                f"1 to {_MAX_COUNT}",
            ),
            (
                "min_tokens",
                self.min_tokens,
                0 <= self.min_tokens <= self.max_tokens,
                "0 to max_tokens",
            ),
            *(
                (name, value, -2.0 <= value <= 2.0, "-2 to 2")
                for name, value in (
                    ("frequency_penalty", self.frequency_penalty),
                    ("presence_penalty", self.presence_penalty),
                )
            ),
            (
                "repetition_penalty",
                self.repetition_penalty,
                # 0.01 is a bit less on the wire, which has single precision.
                0.01 <= round(self.repetition_penalty, 6) <= 100.0,
                "0.01 to 100",
            ),
            (
                "top_logprobs",
                self.top_logprobs,
                0 <= self.top_logprobs <= MAX_TOP_LOGPROBS,
                f"0 to {MAX_TOP_LOGPROBS}",
            ),
        )
        if self.constraint is not None:
            # A complete answer may be followed by an end token only, so one must be able to end it.
            yield "min_tokens", self.min_tokens, not self.min_tokens, "0 with a constraint"
            yield "ignore_eos", self.ignore_eos, not self.ignore_eos, "false with a constraint"
        for token, bias in self.logit_bias:
            yield f"logit_bias[{token}]", bias, -100.0 <= bias <= 100.0, "-100 to 100"
