"""How tokens are drawn and why an output ends: what router and engine both know. Plain Python."""

import enum
from dataclasses import dataclass

from epd.errors import InvalidRequestError


class FinishReason(enum.Enum):
    """Why an output ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn; defaults equal the proto's."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def validate(self) -> None:
        """Checks the ranges.

        Raises:
            InvalidRequestError: names the field, its value and the range.
        """
        checks = (
            ("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "0 to 100"),
            ("top_k", self.top_k, self.top_k >= 0, "0 or more"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "1 or more"),
            (
                "min_tokens",
                self.min_tokens,
                0 <= self.min_tokens <= self.max_tokens,
                "0 to max_tokens",
            ),
        )
        for name, value, good, allowed in checks:
            if not good:  # NaN fails every comparison, so it is refused too
                raise InvalidRequestError(
                    f"{name} is {value}, allowed is {allowed}", field=f"sampling.{name}"
                )
