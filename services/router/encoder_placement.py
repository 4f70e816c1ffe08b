"""Which encoder each image of a request goes to.

Three things pull: an embedding that an encoder holds costs nothing there; contents should be at
home on one encoder, so that routers agree without talking; and the images of one request are waited
for together, so what has to be encoded is spread evenly.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

from blake3 import blake3

from epd.media import media_files
from services.router.pick import Addressed
from services.router.prompt import SourceImage

#: How far above the mean load an encoder may be and still be sent an image it holds.
HOLDER_LOAD_FACTOR = 1.25
#: Models see no more of an image than about this; a larger one is no more work.
MOST_PIXELS = 1 << 20


class EncoderPlacement:
    """Remembers where images went, so that one that had to leave its home is found again.

    Args:
        capacity: Images remembered, the least recently placed go first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[bytes, str] = OrderedDict()

    def place(
        self, images: Sequence[SourceImage], encoders: Sequence[Addressed]
    ) -> tuple[list[list[SourceImage]], int]:
        """The images of each encoder, and how many went to their first choice.

        The most work is placed first. Loads and work count in images of this request's mean size.
        Equal images meet at one encoder.
        """
        work = [min(image.pixels, MOST_PIXELS * len(media_files(image.data))) for image in images]
        mean_work = sum(work) / len(work)
        loads = [float(encoder.load) for encoder in encoders]
        even = (sum(loads) + len(images)) / len(encoders)
        groups: list[list[SourceImage]] = [[] for _ in encoders]
        placed: dict[bytes, int] = {}
        first_choices = 0
        for index in sorted(range(len(images)), key=lambda index: -work[index]):
            image, weight = images[index], work[index] / mean_work
            first, position = self._choose(image.digest, weight, encoders, loads, even)
            if image.digest in placed:  # a second time in one request it is no work
                position, weight = placed[image.digest], 0.0
            placed[image.digest] = position
            loads[position] += weight
            groups[position].append(image)
            first_choices += position == first
            self._remember(image.digest, encoders[position].address)
        for group in groups:
            group.sort(key=lambda image: image.index)
        return groups, first_choices

    def _choose(
        self,
        digest: bytes,
        weight: float,
        encoders: Sequence[Addressed],
        loads: Sequence[float],
        even: float,
    ) -> tuple[int, int]:
        """First choice and choice. An encoder that does nothing may always be chosen."""
        order = self._order(digest, encoders)
        holder = self._holders.get(digest)
        held = holder is not None and encoders[order[0]].address == holder
        limit = math.ceil(HOLDER_LOAD_FACTOR * even) if held else even
        if loads[order[0]] + weight <= max(limit, weight) + 1e-6:
            return order[0], order[0]
        # Its home has enough to do: it goes where it is done first.
        return order[0], min(order, key=lambda position: loads[position])

    def _order(self, digest: bytes, encoders: Sequence[Addressed]) -> list[int]:
        """The holder, then rendezvous hashing: when an encoder goes, only its contents move."""
        holder = self._holders.get(digest)
        return sorted(
            range(len(encoders)),
            key=lambda position: (
                encoders[position].address != holder,
                blake3(digest + encoders[position].address.encode()).digest(),
            ),
        )

    def _remember(self, digest: bytes, address: str) -> None:
        self._holders[digest] = address
        self._holders.move_to_end(digest)
        if len(self._holders) > self._capacity:
            self._holders.popitem(last=False)
