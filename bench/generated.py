"""What an arm of a generation benchmark gives back."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Generated:
    """``token_ids`` holds the new tokens of each prompt; ``step_s`` is seconds per decode step."""

    token_ids: list[list[int]]
    step_s: float
