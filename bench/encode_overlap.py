"""encode_overlap: what prefill gains and costs by beginning while images are still encoded.

One fleet, and two routers before it that differ in ``--encode-overlap`` only, are asked in turns
for a long text with several new images. *Idle*: nothing else is there. *Joined*: a few
texts come at some moment of its life, the same for both routers; their own time to first token is
the cost, since a request that has begun holds a place at prefill. *Loaded*: texts are computed all
the time, so prefill is never idle. Encoder and prefill have a core each.
"""

import argparse
import contextlib
import itertools
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from bench.harness import Measure, Ratio, Sample, interleave, ratio, typical
from bench.image_fleet import ImageFleet, image_fleet, noise_image
from bench.outcome import Outcome
from bench.vision_model import Tower, make_vision_model

STATES = ("idle", "joined", "loaded")
#: Words of a text in the background: a fraction of the measured one, as most prompts are.
BACKGROUND_WORDS = 200
#: Until both routers have heard that the workers have nothing to do: some load reports.
SETTLE_S = 0.6
#: Texts join within this time: longer than the request lives, so that it delays some of them
#: whether it computes its text early or late.
JOIN_WITHIN_S = 1.5


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--images", type=int, default=4, help="images of one request")
    parser.add_argument("--words", type=int, default=800, help="words before the images")
    parser.add_argument("--clients", type=int, default=2, help="that send texts")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of A B B A")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="little of everything")


def run(options: argparse.Namespace) -> Outcome:
    """Measures both routers, idle and loaded."""
    if options.quick:
        options.rounds = 3
    uncached = ["--prefix-cache=false"]
    flags = {"prefill": uncached, "decode": uncached, "encoder": ["--max-batch=1"]}
    samples: dict[str, list[Sample]] = {}
    engaged: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="epd-bench-model-") as folder:
        model = make_vision_model(Path(folder), Tower())
        with image_fleet(model, flags=flags) as fleet:
            numbers = itertools.count()
            arms = {
                name: _Arm(fleet.beside(name, f"--encode-overlap={value}"), numbers, options)
                for name, value in (("on", "true"), ("off", "false"))
            }
            fleet.pin_encoders()
            for state in STATES:
                before = _overlaps(fleet), arms["on"].asked
                measures = {name: arm.measure(state) for name, arm in arms.items()}
                samples[state] = interleave(measures, options.rounds, options.seed)
                begun, asked = _overlaps(fleet) - before[0], arms["on"].asked - before[1]
                engaged[state] = round(begun / asked, 3)
            texts = {
                state: {name: round(fmean(arm.text_ms[state]), 2) for name, arm in arms.items()}
                for state in STATES[1:]
            }
    found = {state: ratio(samples[state], "on", "off") for state in STATES}
    _print(samples, found, engaged, texts)
    result = {
        "ttft_on_over_off": {state: round(found[state].value, 3) for state in STATES},
        "interval": {
            state: [round(found[state].low, 3), round(found[state].high, 3)] for state in STATES
        },
        "ttft_ms": {
            state: {name: round(typical(samples[state], name), 1) for name in arms}
            for state in STATES
        },
        "text_ttft_on_over_off": {
            state: round(of["on"] / of["off"], 3) for state, of in texts.items()
        },
        "text_ttft_ms": texts,
        "engaged": engaged,
        "images": options.images,
        "words": options.words,
    }
    return Outcome(result, [sample for state in STATES for sample in samples[state]])


class _Arm:
    """One router."""

    def __init__(
        self, router: ImageFleet, numbers: "itertools.count[int]", options: argparse.Namespace
    ) -> None:
        self._router = router
        self._numbers = numbers
        self._options = options
        self.asked = 0
        #: Times to first token of the other texts, by state.
        self.text_ms: dict[str, list[float]] = {state: [] for state in STATES}

    def measure(self, state: str) -> Measure:
        """Asks for a text with new images; gives the milliseconds to the first token."""
        return {"idle": self._idle, "joined": self._joined, "loaded": self._loaded}[state]

    def _idle(self, seed: int) -> float:
        time.sleep(SETTLE_S)
        return self._ask()

    def _joined(self, seed: int) -> float:
        def join(number: int) -> None:
            time.sleep(random.Random(f"{seed} {number}").uniform(0, JOIN_WITHIN_S))
            self._ask_text("joined")

        time.sleep(SETTLE_S)
        with self._clients(join):
            return self._ask()

    def _loaded(self, seed: int) -> float:
        stop = threading.Event()

        def keep_busy(number: int) -> None:
            while not stop.is_set():
                self._ask_text("loaded")

        with self._clients(keep_busy):
            time.sleep(SETTLE_S)
            try:
                return self._ask()
            finally:
                stop.set()

    @contextlib.contextmanager
    def _clients(self, body: Callable[[int], None]) -> Iterator[None]:
        count = self._options.clients
        clients = [threading.Thread(target=body, args=(number,)) for number in range(count)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            for client in clients:
                client.join()

    def _ask(self) -> float:
        # Every request has images of its own: the routers share an encoder and its cache.
        count = self._options.images
        images = [noise_image(Tower.image_side, next(self._numbers)) for _ in range(count)]
        self.asked += 1
        return self._router.ask(images, "word " * self._options.words, text_first=True).ttft_ms

    def _ask_text(self, state: str) -> None:
        self.text_ms[state].append(self._router.ask([], "word " * BACKGROUND_WORDS).ttft_ms)


def _overlaps(fleet: ImageFleet) -> float:
    """Requests that prefill has begun early."""
    return fleet.metric("on", "epd_route_encode_overlap_total")


def _print(
    samples: dict[str, list[Sample]],
    found: dict[str, Ratio],
    engaged: dict[str, float],
    texts: dict[str, dict[str, float]],
) -> None:
    table = Table(title="Prefill begins while images are encoded")
    columns = ("prefill", "TTFT off ms", "TTFT on ms", "on / off", "begun early", "texts on / off")
    for column in columns:
        table.add_column(column, justify="right")
    for state in STATES:
        on, off = (typical(samples[state], name) for name in ("on", "off"))
        value = found[state]
        interval = f"{value.value:.2f} ({value.low:.2f} to {value.high:.2f})"
        cost = f"{texts[state]['on'] / texts[state]['off']:.2f}" if state in texts else ""
        table.add_row(state, f"{off:.0f}", f"{on:.0f}", interval, f"{engaged[state]:.0%}", cost)
    Console().print(table)
