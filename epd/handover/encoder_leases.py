"""The leases of one request's embeddings at their encoders."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from epd.errors import EpdError, NotFoundError, UnavailableError
from epd.handover.control import EncoderControl
from epd.handover.embedding_handle import EmbeddingHandle

log = logging.getLogger(__name__)


class EncoderLeases:
    """Keeps leases while READs run and says whether they held all the time.

    An encoder may hand the memory of a lapsed lease to another image, and a READ of that succeeds.
    So what was read counts only when every lease is known to have held until after the READ. The
    encoder in turn holds memory back only for those that have renewed its lease as a reader.
    """

    def __init__(
        self,
        handles: Sequence[EmbeddingHandle],
        control: Callable[[str], EncoderControl],
        timeout_s: float,
    ) -> None:
        self._by_address: dict[str, list[EmbeddingHandle]] = {}
        for handle in handles:
            self._by_address.setdefault(handle.encoder_address, []).append(handle)
        self._control = control
        self._timeout_s = timeout_s
        self._lease_s = min((handle.lease_s for handle in handles), default=0.0)
        self._renewed = asyncio.Event()
        #: When the last renewal that every encoder has confirmed was sent; monotonic seconds.
        self._renewed_s = 0.0

    async def renew_on(self) -> None:
        """Renews at once and then three times per lease, until cancelled.

        Raises:
            NotFoundError: an encoder does not know a handle.
            UnavailableError: an encoder cannot be reached.
        """
        while self._by_address:
            sent = time.monotonic()
            await asyncio.gather(*map(self._renew, self._by_address))
            self._renewed_s = sent
            self._renewed.set()
            await asyncio.sleep(self._lease_s / 3)

    async def confirm(self) -> None:
        """Returns when all leases are known to have held until now; :meth:`renew_on` must run.

        Raises:
            NotFoundError: a lease may have lapsed meanwhile.
        """
        if not self._by_address:
            return
        await self._renewed.wait()
        if time.monotonic() - self._renewed_s >= self._lease_s:
            raise NotFoundError(
                f"embedding lease of {self._lease_s} s lapsed during the READ",
                reason="HANDLE_EXPIRED",
            )

    async def release(self, settled: bool) -> None:
        """Gives all leases back; ``settled``: no READ runs or will be posted. Failures are logged:
        such a lease ends by itself.
        """
        await asyncio.gather(*(self._release(address, settled) for address in self._by_address))

    async def _renew(self, address: str) -> None:
        handle_ids = [handle.handle_id for handle in self._by_address[address]]
        try:
            async with asyncio.timeout(self._timeout_s):
                unknown = await self._control(address).renew(handle_ids)
        except (EpdError, TimeoutError) as error:
            text = error.message if isinstance(error, EpdError) else f"{self._timeout_s} s"
            raise UnavailableError(
                f"encoder {address} did not renew embedding leases: {text}",
                reason="ENCODER_UNREACHABLE",
            ) from error
        if unknown:
            raise NotFoundError(
                f"encoder {address} does not know embedding {', '.join(unknown)} (any more)",
                reason="HANDLE_UNKNOWN",
            )

    async def _release(self, address: str, settled: bool) -> None:
        handle_ids = [handle.handle_id for handle in self._by_address[address]]
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._control(address).release(handle_ids, settled)
        except (EpdError, TimeoutError) as error:
            log.warning("encoder %s did not take leases back: %r", address, error)
