"""Layers of a push that leave as one WRITE."""

from dataclasses import dataclass

from epd.handover.step_segments import StepSegments
from epd.transfer.base import Segment


@dataclass
class LayerBatch:
    """Consecutive layers of one step, with the same blocks each.

    It takes further layers until the agent asks what to WRITE. So a layer leaves alone, and at
    once, while the agent has nothing else to do, and the layers that come while it is busy share
    one WRITE and one notice: under load their cost does not grow with the number of layers. The
    seal joins the last ones likewise.
    """

    step: StepSegments
    layers: range
    #: Among the transfer's KV WRITEs.
    ordinal: int
    #: The seal record here, when it leaves with these layers.
    seal: Segment | None = None

    def takes(self, layer: int, step: StepSegments, most_bytes: int) -> bool:
        """Whether a layer may join: the next one of the same step, and not too much in all."""
        grown = self.step.layer_bytes * (len(self.layers) + 1)
        return layer == self.layers.stop and step is self.step and grown <= most_bytes

    def add_next(self) -> None:
        """Takes the next layer in."""
        self.layers = range(self.layers.start, self.layers.stop + 1)

    @property
    def title(self) -> str:
        """For error texts."""
        first, last = self.layers.start, self.layers.stop - 1
        return f"layer {first}" if first == last else f"layers {first} to {last}"
