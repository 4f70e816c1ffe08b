"""How many prompt tokens a step may take so that running answers keep their pace. Plain Python."""

_FADE = 0.9


class ChunkLimit:
    """Learns from measured steps what a decode step and a prompt token cost.

    Args:
        target_s: Longest step while answers run; 0 sets no limit.
        least: The limit never falls below so many tokens, so that prompts always get on.
    """

    def __init__(self, target_s: float, least: int) -> None:
        self._target_s = target_s
        self._least = least
        self._decode_s = 0.0
        self._token_s = 0.0

    @property
    def decode_s(self) -> float:
        """How long a step without prompts takes; 0 before the first."""
        return self._decode_s

    def tokens(self, budget: int) -> int:
        """Most prompt tokens of a step in which answers run; at most ``budget``."""
        if not self._target_s or not self._token_s:
            return budget
        room = int((self._target_s - self._decode_s) / self._token_s)
        return min(budget, max(self._least, room))

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Takes a step with so many single tokens and prompt tokens."""
        if not prompt_tokens:
            self._decode_s = _blend(self._decode_s, seconds)
            return
        rest_s = max(seconds - (self._decode_s if decodes else 0.0), 0.0)
        self._token_s = _blend(self._token_s, rest_s / prompt_tokens)


def _blend(known: float, seen: float) -> float:
    return _FADE * known + (1 - _FADE) * seen if known else seen
