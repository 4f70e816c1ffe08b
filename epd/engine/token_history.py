"""Which tokens a request holds, as penalties count them. Plain Python, no torch."""

from collections import Counter
from collections.abc import Iterable, Sequence


class TokenHistory:
    """Tokens of a growing sequence, counted once each.

    The prompt is what the client sent with its placeholders; everything after it is output, whether
    this attempt has drawn it, an earlier one, or another worker. So penalties are the same wherever
    a request goes on.

    Args:
        prompt: Tokens of the prompt.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._seen = dict.fromkeys(prompt)
        self._output: Counter[int] = Counter()
        self._output_len = 0

    def catch_up(self, output: Sequence[int]) -> None:
        """Counts what is new of the whole output so far."""
        fresh = output[self._output_len :]
        self._seen.update(dict.fromkeys(fresh))
        self._output.update(fresh)
        self._output_len = len(output)

    @property
    def seen(self) -> list[int]:
        """Tokens of prompt and output, each once."""
        return list(self._seen)

    @property
    def output_counts(self) -> Counter[int]:
        """How often the output holds each of its tokens; not to be changed."""
        return self._output
