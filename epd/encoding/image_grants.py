"""From the images of a call to a pinned place in memory for each of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epd.encoding.embedding import EmbeddingSpec
from epd.encoding.embedding_cache import CacheEntry, EntryState
from epd.encoding.embedding_store import EmbeddingStore
from epd.encoding.encode_events import ImageInput
from epd.encoding.image_examiner import ImageExaminer, MediaHeader
from epd.encoding.production import Production
from epd.encoding.productions import Productions
from epd.errors import InternalError, ResourceExhaustedError


@dataclass(frozen=True)
class Grant:
    """One image of a call with its pin."""

    image: ImageInput
    entry: CacheEntry
    handle_id: str
    production: Production | None

    @property
    def cache_hit(self) -> bool:
        """Whether the embedding was ready when the call asked."""
        return self.production is None


class ImageGrants:
    """Grants all images of a call or none, and sees to it that somebody makes what is missing.

    Args:
        store: Where embeddings lie.
        productions: Makes them.
        examiner: Looks at the files.
        spec: What the embedding of an image will be; raises InvalidRequestError.
        features: Features of one row of an embedding.
        max_pending: Most images in the making.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        productions: Productions,
        examiner: ImageExaminer,
        spec: Callable[[ImageInput, MediaHeader], EmbeddingSpec],
        features: int,
        max_pending: int,
    ) -> None:
        self._store = store
        self._productions = productions
        self._examiner = examiner
        self._spec = spec
        self._features = features
        self._max_pending = max_pending
        self.queries = 0
        self.hits = 0

    async def grant(self, images: Sequence[ImageInput]) -> list[Grant]:
        """Pins an entry for each image: found ones, and new ones for all others or for none.

        Raises:
            InvalidRequestError: an image is not acceptable.
            ResourceExhaustedError: too many images are pending, or memory is short.
        """
        granted: dict[int, Grant] = {}
        try:
            for position, image in enumerate(images):
                entry = self._store.cache.find(image.digest)
                if entry is not None:  # pinned, so that it is still there after the examination
                    granted[position] = self._pin(image, entry)
            headers = await self._examiner.examine(
                images,
                [n not in granted or not granted[n].cache_hit for n in range(len(images))],
            )
            self._claim(images, headers, granted)
        except BaseException:
            held = [one.handle_id for one in granted.values()]
            self._store.leases.release(held, settled=True)
            raise
        self.queries += len(images)
        self.hits += sum(one.cache_hit for one in granted.values())
        return [granted[position] for position in range(len(images))]

    def _claim(
        self,
        images: Sequence[ImageInput],
        headers: Sequence[MediaHeader | None],
        granted: dict[int, Grant],
    ) -> None:
        """Adds to ``granted`` what is missing. Does not wait: nothing may change in between."""
        cache = self._store.cache
        wanted: dict[bytes, tuple[ImageInput, EmbeddingSpec]] = {}
        for position, image in enumerate(images):
            if position in granted and granted[position].entry.state is not EntryState.WITHDRAWN:
                continue
            if cache.find(image.digest) is None:
                header = headers[position]
                assert header is not None
                wanted[image.digest] = image, self._spec(image, header)
        self._check_room(len(wanted))
        entries = cache.claim([(digest, spec) for digest, (_, spec) in wanted.items()])
        for entry in entries:
            self._productions.start(entry, wanted[entry.digest][0].data)
        for position, image in enumerate(images):
            if position not in granted or granted[position].entry.state is EntryState.WITHDRAWN:
                found = cache.find(image.digest)
                assert found is not None
                replaced = granted.pop(position, None)
                granted[position] = self._pin(image, found)
                if replaced is not None:
                    self._store.leases.release([replaced.handle_id], settled=True)

    def _check_room(self, wanted: int) -> None:
        if len(self._productions) + wanted > self._max_pending:
            raise ResourceExhaustedError(
                f"{len(self._productions)} images are pending and {wanted} more wanted, "
                f"the limit is {self._max_pending}",
                reason="QUEUE_FULL",
                retry_after_s=0.25,
            )

    def _pin(self, image: ImageInput, entry: CacheEntry) -> Grant:
        self._check_held(entry)
        production = None if entry.state is EntryState.READY else self._productions[entry]
        return Grant(image, entry, self._store.leases.grant(entry), production)

    def _check_held(self, entry: CacheEntry) -> None:
        expected = (entry.spec.plan.embedding_tokens, self._features)
        if entry.spec.shape != expected or entry.spec.byte_count != entry.memory.length:
            raise InternalError(
                f"cached as {entry.spec.shape} in {entry.memory.length} bytes, expected {expected}"
            )
