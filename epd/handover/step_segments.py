"""What one step of a prompt adds to every layer, and where it goes."""

from collections.abc import Sequence

from epd.handover.block_runs import KvRoute, block_runs
from epd.transfer.segments import SegmentArray


class StepSegments:
    """The blocks that a step has completed; the same ones in each layer.

    Segments are worked out for all layers at once, when the first are asked for: the layers that
    follow cost a slice each. The engine thread makes it, the agent thread asks.

    Args:
        route: To the worker that gets the blocks.
        local: Block ids here.
        remote: Those there, one for each.
        layer_count: Layers of either side.
    """

    def __init__(
        self, route: KvRoute, local: Sequence[int], remote: Sequence[int], layer_count: int
    ) -> None:
        assert len(local) == len(remote)
        self.layer_bytes = route.layer_bytes(len(local))
        self._route = route
        self._local = local
        self._remote = remote
        self._layer_count = layer_count
        self._pairs: tuple[SegmentArray, SegmentArray] | None = None

    def prepare(self) -> tuple[SegmentArray, SegmentArray]:
        """Segment pairs of all layers, layer by layer; works them out when called first."""
        if self._pairs is None:
            runs = block_runs(self._local, self._remote)
            self._pairs = self._route.segments(runs, range(self._layer_count))
        return self._pairs

    def of_layers(self, layers: range) -> tuple[SegmentArray, SegmentArray]:
        """Segment pairs of some layers, here and there."""
        sources, targets = self.prepare()
        each = len(sources) // self._layer_count
        part = slice(layers.start * each, layers.stop * each)
        return sources[part], targets[part]
