"""What every benchmark returns."""

from dataclasses import dataclass
from typing import Any

from bench.harness import Sample


@dataclass(frozen=True)
class Outcome:
    """``result`` is the JSON of the last line, ``raw`` all samples it was made from."""

    result: dict[str, Any]
    raw: list[Sample]
