"""The tokens that stand for images and videos in a rendered prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

from epd.errors import UnsupportedFeatureError
from epd.media import Media, Video
from services.router.placeholders import anchor_mismatch


@dataclass(frozen=True)
class AnchorTokens:
    """As the model folder names them; None where it does not."""

    image: int | None
    video: int | None = None

    def places(self, token_ids: Sequence[int], media: Sequence[Media]) -> list[int]:
        """Where each image or video stands, in their order.

        Raises:
            UnsupportedFeatureError: the model folder does not name the token of one.
            InvalidRequestError: there are more or fewer anchors than images, or of another kind.
        """
        if not media:
            return []
        wanted = [self._token(one) for one in media]
        places = [index for index, token in enumerate(token_ids) if token in set(wanted)]
        if [token_ids[place] for place in places] != wanted:
            raise anchor_mismatch(len(places), len(media))
        return places

    def _token(self, media: Media) -> int:
        is_video = isinstance(media, Video)
        token = self.video if is_video else self.image
        if token is None:
            kind = "video" if is_video else "image"
            raise UnsupportedFeatureError(
                f"the model's configuration names no {kind} token",
                reason=f"NO_{kind.upper()}_TOKEN",
            )
        return token
