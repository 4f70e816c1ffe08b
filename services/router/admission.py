"""Which requests are live: no two with one id, and no more than the router has memory for."""

import contextlib
from collections.abc import Callable, Iterator

from epd.errors import DuplicateRequestError, ResourceExhaustedError


class Place:
    """A live request's place.

    Args:
        take: Accounts for image bytes; raises ResourceExhaustedError.
    """

    def __init__(self, take: Callable[[int], None]) -> None:
        self._take = take
        self.image_bytes = 0

    def hold(self, byte_count: int) -> None:
        """The request holds that many more bytes of images, until it ends.

        Raises:
            ResourceExhaustedError: all requests together would hold too many.
        """
        self._take(byte_count)
        self.image_bytes += byte_count


class Admission:
    """Counts live requests and the image bytes they hold.

    Args:
        max_requests: Most live requests.
        max_image_bytes: Most image bytes of all live requests together.
    """

    def __init__(self, max_requests: int, max_image_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_image_bytes = max_image_bytes
        self._live: set[tuple[str, str]] = set()
        self._image_bytes = 0

    @property
    def live_requests(self) -> int:
        """Requests that are admitted now."""
        return len(self._live)

    @contextlib.contextmanager
    def admitted(self, client: str, request_id: str, image_bytes: int) -> Iterator[Place]:
        """Holds a place until the block is left. Ids of different clients never meet.

        Raises:
            DuplicateRequestError: a live request has the id.
            ResourceExhaustedError: the router is full.
        """
        live = (client, request_id)
        if live in self._live:
            raise DuplicateRequestError(f"request {request_id} is still being served")
        if len(self._live) >= self._max_requests:
            raise ResourceExhaustedError(
                f"the router serves {self._max_requests} requests already", reason="ROUTER_FULL"
            )
        place = Place(self._take)
        place.hold(image_bytes)
        self._live.add(live)
        try:
            yield place
        finally:
            self._live.remove(live)
            self._image_bytes -= place.image_bytes

    def _take(self, image_bytes: int) -> None:
        if self._image_bytes + image_bytes > self._max_image_bytes:
            raise ResourceExhaustedError(
                f"the images of all live requests would take more than {self._max_image_bytes} "
                "bytes",
                reason="ROUTER_FULL",
            )
        self._image_bytes += image_bytes
