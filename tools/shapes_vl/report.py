"""The log of a training run."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from .batch import Batch
from .loss import Losses


class Report:
    """Running means over the last steps, and the share of right answers per kind."""

    def __init__(self) -> None:
        self._losses: deque[list[float]] = deque(maxlen=50)
        self._right: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=400))

    def add(self, losses: Losses, batch: Batch) -> None:
        """Note one step."""
        parts = (losses.answer, losses.patch, losses.feature, losses.ordinal, losses.change)
        self._losses.append([float(part.detach()) for part in parts])
        kinds = [kind for text in batch.texts for kind in text.turn_kinds]
        for kind, right in zip(kinds, losses.right.tolist(), strict=True):
            self._right[kind].append(right)

    def line(self) -> str:
        """One line for the log."""
        answer, patch, feature, ordinal, change = np.mean(np.array(self._losses), axis=0)
        kinds = " ".join(f"{k} {np.mean(v):.2f}" for k, v in sorted(self._right.items()))
        return (
            f"loss {answer:.3f} aux {patch:.2f} {feature:.2f} {ordinal:.2f} {change:.2f} | {kinds}"
        )
