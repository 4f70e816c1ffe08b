"""Sends a request's images to the encoders that suit them."""

from opentelemetry.metrics import Counter

from services.router.attempt import Work
from services.router.encode_stage import EncodedImages, encode
from services.router.encoder_placement import EncoderPlacement
from services.router.handles import HandleSet
from services.router.routes import Routes


class ImageDispatch:
    """Chooses encoders and asks them.

    Args:
        routes: Knows the encoders.
        placement: Chooses among them.
        affinity_hits: Counts images that went to the encoder that holds them.
    """

    def __init__(self, routes: Routes, placement: EncoderPlacement, affinity_hits: Counter) -> None:
        self._routes = routes
        self._placement = placement
        self._affinity_hits = affinity_hits

    async def encode(
        self, work: Work, handles: HandleSet, encoded: EncodedImages, *, until_ready: bool = True
    ) -> None:
        """Returns once all images are ready, or only planned; ``encoded`` fills up meanwhile.

        Raises:
            LegFailedError: an encoder failed.
            UnavailableError: there is none.
        """
        encoders = await self._routes.encoders(work)
        groups, first_choices = self._placement.place(work.prompt.images, encoders)
        self._affinity_hits.add(first_choices)
        await encode(
            work.request_id,
            [(worker, group) for worker, group in zip(encoders, groups, strict=True) if group],
            handles,
            work.deadline,
            encoded,
            until_ready=until_ready,
        )
