"""The first leg of a request with images: embeddings, made or found by the encoders."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epd.errors import InternalError
from epd.rpc.status import root_error
from epd.v1 import encoder_pb2
from epd.wire.media import media_fields
from epd.wire.timings import timings_from_proto
from services.router.deadline import Deadline
from services.router.handles import HandleSet
from services.router.leg import run_leg
from services.router.placeholders import ImagePlan
from services.router.prompt import SourceImage
from services.router.workers import Worker


@dataclass
class EncodedImages:
    """What the encoders have said so far, by image index. Timings are of the last image ready."""

    image_count: int
    plans: dict[int, ImagePlan] = field(default_factory=dict)
    timings_ns: Mapping[str, int] = field(default_factory=dict)
    service_ns: int = 0
    started_ns: int = field(default_factory=time.monotonic_ns)
    wall_ns: int = 0
    ready: set[int] = field(default_factory=set)
    #: Set once every image is planned.
    planned: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pending(self) -> frozenset[int]:
        """Images whose embedding is not in place yet, as far as is known here."""
        return frozenset(
            index
            for index, plan in self.plans.items()
            if not plan.cache_hit and index not in self.ready
        )

    def add(self, plan: ImagePlan) -> None:
        """An image is planned."""
        self.plans[plan.index] = plan
        if len(self.plans) == self.image_count:
            self.planned.set()

    def in_order(self) -> list[ImagePlan]:
        """The plans in the order of the images."""
        return [self.plans[index] for index in sorted(self.plans)]


async def encode(
    request_id: str,
    groups: Sequence[tuple[Worker, Sequence[SourceImage]]],
    handles: HandleSet,
    deadline: Deadline,
    encoded: EncodedImages,
    *,
    until_ready: bool = True,
) -> None:
    """Sends every encoder its images; one call per encoder, in parallel. ``encoded`` fills up.

    The first call that fails cancels the others. All handles land in the given set, whose owner
    gives them back. With ``until_ready`` off it is enough that all images are planned.

    Raises:
        LegFailedError: what an encoder answered, or that it was lost.
    """
    try:
        with contextlib.ExitStack() as bookings:
            for worker, group in groups:
                worker.breaker.begin()
                bookings.enter_context(worker.account.booked(len(group)))
            async with asyncio.TaskGroup() as tasks:
                keeper = tasks.create_task(handles.keep_alive())
                calls = [
                    tasks.create_task(
                        run_leg(
                            worker,
                            _call(
                                request_id, worker, group, handles, deadline, encoded, until_ready
                            ),
                        )
                    )
                    for worker, group in groups
                ]
                await asyncio.wait(calls)
                keeper.cancel()
    except BaseExceptionGroup as group_error:
        raise root_error(group_error) from None
    encoded.wall_ns = time.monotonic_ns() - encoded.started_ns


async def _call(
    request_id: str,
    worker: Worker,
    images: Sequence[SourceImage],
    handles: HandleSet,
    deadline: Deadline,
    encoded: EncodedImages,
    until_ready: bool,
) -> None:
    request = encoder_pb2.EncodeRequest(
        request_id=request_id,
        images=[
            encoder_pb2.EncodeImage(
                image_index=image.index,
                digest=image.digest,
                **media_fields(image.data),
            )
            for image in images
        ],
        attempt_id=handles.attempt_id,
    )
    handles.ask(worker)
    started_ns, images_there = time.monotonic_ns(), worker.load
    waiting = {image.index for image in images}
    call = worker.encoder.Encode(request, timeout=deadline.remaining_s())
    try:
        async for response in call:
            match response.WhichOneof("event"):
                case "planned":
                    plan = _plan(response.planned, worker)
                    handles.add(worker, plan)
                    encoded.add(plan)
                    if not until_ready:
                        waiting.discard(plan.index)
                case "ready" if until_ready:
                    waiting.discard(response.ready.image_index)
                    encoded.ready.add(response.ready.image_index)
                    encoded.timings_ns = timings_from_proto(response.ready.timings)
                    encoded.service_ns = response.ready.service_ns
            if not waiting and not until_ready:
                return
        # Read to the end: a cancelled call would make the encoder drop the embeddings.
    finally:
        call.cancel()
    worker.speed.add(images_there, (time.monotonic_ns() - started_ns) / 1e9)
    if waiting:
        raise InternalError(f"encoder {worker.address} ended without images {sorted(waiting)}")


def _plan(planned: encoder_pb2.Planned, worker: Worker) -> ImagePlan:
    handle = planned.handle
    if not handle.encoder_address:
        handle.encoder_address = worker.address
    return ImagePlan(
        index=planned.image_index,
        grid=planned.grid,
        anchor_token_id=planned.anchor_token_id,
        placeholder_ids=tuple(planned.placeholder_ids),
        position_delta=planned.position_delta,
        handle=handle,
        cache_hit=planned.cache_hit,
    )
