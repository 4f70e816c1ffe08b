"""A running fleet, and requests with images to it."""

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import psutil
from PIL import Image

from epd.fleet.fleet import Fleet
from epd.fleet.plan import FleetPlan
from epd.telemetry.prometheus import scrape
from epd.v1 import common_pb2, router_pb2, router_pb2_grpc

TIMEOUT_S = 120.0
_LARGE = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


@dataclass(frozen=True)
class FirstToken:
    """When it came, seen from the client, and the router's account of the time before it."""

    ttft_ms: float
    stages_ms: dict[str, float]


class ImageFleet:
    """Asks a fleet through one of its routers. Made by :func:`image_fleet`."""

    def __init__(self, fleet: Fleet, router: str = "router") -> None:
        self.fleet = fleet
        self._channel = grpc.insecure_channel(fleet.processes[router].address, options=_LARGE)
        self._router = router_pb2_grpc.RouterServiceStub(self._channel)
        self._others: list[ImageFleet] = []

    def beside(self, name: str, *flags: str) -> "ImageFleet":
        """The same fleet through another router with these flags, closed with this one."""
        self.fleet.add_router(name, *flags)
        self._others.append(ImageFleet(self.fleet, name))
        return self._others[-1]

    def ask(
        self, images: Sequence[bytes], text: str = "what is it?", *, text_first: bool = False
    ) -> FirstToken:
        """One request with one token of answer."""
        parts = [router_pb2.ContentPart(image=image) for image in images]
        parts.insert(0 if text_first else len(parts), router_pb2.ContentPart(text=text))
        message = router_pb2.ChatMessage(role="user", parts=parts)
        request = router_pb2.GenerateRequest(
            conversation=router_pb2.Conversation(messages=[message]),
            sampling=common_pb2.SamplingParams(max_tokens=1, ignore_eos=True),
        )
        started = time.perf_counter()
        first_s, stages = 0.0, {}
        for response in self._router.Generate(request, timeout=TIMEOUT_S):
            if response.HasField("delta"):
                first_s = first_s or time.perf_counter() - started
            else:
                stages = {one.stage: one.duration_ns / 1e6 for one in response.completion.timings}
        return FirstToken(first_s * 1e3, stages)

    def resident_mib(self, name: str) -> float:
        """Memory of a process without its children."""
        return float(psutil.Process(self.fleet.processes[name].pid).memory_info().rss) / (1 << 20)

    def metric(self, name: str, metric: str) -> float:
        """A metric of a process, summed over its labels."""
        return scrape(self.fleet.processes[name].metrics_address).total(metric)

    def pin(self, name: str, core: int) -> None:
        """Keeps a process, its threads and its children on one core."""
        process = psutil.Process(self.fleet.processes[name].pid)
        for member in (process, *process.children(recursive=True)):
            for thread in member.threads():
                os.sched_setaffinity(thread.id, {core})

    def pin_encoders(self) -> None:
        """Encoders get a core each, everything else the last one."""
        cores = sorted(os.sched_getaffinity(0))
        for name in self.fleet.processes:
            role, _, number = name.partition("-")
            core = int(number) % len(cores) if role == "encoder" else len(cores) - 1
            self.pin(name, cores[core])

    def close(self) -> None:
        """Closes the channels."""
        for one in (self, *self._others):
            one._channel.close()


@contextlib.contextmanager
def image_fleet(
    model: Path, *, encoders: int = 1, flags: Mapping[str, Sequence[str]] | None = None
) -> Iterator[ImageFleet]:
    """A fleet of single-threaded workers; stopped at the end."""
    plan = FleetPlan(
        model,
        encoders=encoders,
        flags=flags or {},
        environment={"OMP_NUM_THREADS": "1", "EPD_THREADS": "1"},
    )
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as logs:
        fleet = Fleet(plan, Path(logs))
        fleet.start()
        asked = ImageFleet(fleet)
        try:
            yield asked
        finally:
            asked.close()
            fleet.stop()


def noise_image(side: int, seed: int) -> bytes:
    """A square PNG that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()
