"""Embeddings of a request's images, fetched from their encoders as tensors."""

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import torch

from epd.cleanup import CleanupTasks
from epd.handover.control import EncoderControl
from epd.handover.embedding_handle import EmbeddingHandle
from epd.handover.embedding_reader import EmbeddingReader, ReadEmbedding, ReadReport
from epd.handover.encoder_leases import EncoderLeases
from epd.telemetry import semconv
from epd.telemetry.transfer_metrics import EmbeddingTransferMetrics
from epd.worker.stages import Stages


@dataclass
class Custody:
    """Handles of one call. ``begun``: their READs may have been posted, who reads gives back."""

    handles: Sequence[EmbeddingHandle]
    begun: bool = False


class Embeddings:
    """The handles of a Prefill call are this worker's to give back, whatever becomes of the call.

    Args:
        reader: Does the READs.
        control: Control calls to the encoder at an address.
        control_timeout_s: Bound of one of them.
        cleanup: Runs what must happen also when the request's own task is cancelled.
        metrics: Bytes and durations.
    """

    def __init__(
        self,
        reader: EmbeddingReader,
        control: Callable[[str], EncoderControl],
        control_timeout_s: float,
        cleanup: CleanupTasks,
        metrics: EmbeddingTransferMetrics,
    ) -> None:
        self._reader = reader
        self._control = control
        self._control_timeout_s = control_timeout_s
        self._cleanup = cleanup
        self._metrics = metrics

    @contextmanager
    def custody(self, handles: Sequence[EmbeddingHandle]) -> Iterator[Custody]:
        """Gives the handles back on exit, in the background, unless :meth:`read` has begun."""
        custody = Custody(handles)
        try:
            yield custody
        finally:
            if handles and not custody.begun:
                leases = EncoderLeases(handles, self._control, self._control_timeout_s)
                self._cleanup.spawn(leases.release(settled=True))

    @asynccontextmanager
    async def read(
        self,
        custody: Custody,
        stages: Stages,
        late: Collection[int] = (),
        arrived: Callable[[int], None] = lambda position: None,
    ) -> AsyncIterator[tuple[torch.Tensor, ...]]:
        """One tensor [tokens, features] per handle, valid inside. Gives the handles back always.

        Those of ``late`` positions are filled when ``arrived`` is called with them.

        Raises:
            EpdError: as :meth:`EmbeddingReader.read`.
        """
        handles = custody.handles
        if not handles:
            yield ()
            return
        custody.begun = True

        def came(position: int, report: ReadReport) -> None:
            self._metrics.record(report.byte_count, report.read_ns)
            arrived(position)

        async with AsyncExitStack() as stack:
            with stages.stage(semconv.SPAN_EMBEDDING_READ) as attributes:
                attributes[semconv.EPD_IMAGE_COUNT] = len(handles)
                try:
                    found, report = await stack.enter_async_context(
                        self._reader.read(handles, late, came)
                    )
                except BaseException:
                    self._metrics.record_failure()
                    raise
                attributes[semconv.EPD_TRANSFER_BYTES] = report.byte_count
                attributes[semconv.EPD_TRANSFER_DESCRIPTORS] = report.descriptor_count
                attributes[semconv.EPD_TRANSFER_TRANSPORT] = handles[0].agent.transport
                tensors = tuple(map(_as_tensor, found))
                if report.byte_count:
                    self._metrics.record(report.byte_count, report.read_ns)
            yield tensors


def _as_tensor(embedding: ReadEmbedding) -> torch.Tensor:
    """The bytes as a tensor, without a copy."""
    flat = torch.from_numpy(embedding.data).view(getattr(torch, embedding.dtype))
    return flat.view(embedding.shape)
