"""Which requests are live: no two with one id, and no more than the router has memory for."""

import contextlib
from collections.abc import Iterator

from epd.errors import DuplicateRequestError, ResourceExhaustedError


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
    def admitted(self, client: str, request_id: str, image_bytes: int) -> Iterator[None]:
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
        if self._image_bytes + image_bytes > self._max_image_bytes:
            raise ResourceExhaustedError(
                f"the images of all live requests would take more than {self._max_image_bytes} "
                "bytes",
                reason="ROUTER_FULL",
            )
        self._live.add(live)
        self._image_bytes += image_bytes
        try:
            yield
        finally:
            self._live.remove(live)
            self._image_bytes -= image_bytes
