"""encoder_parallel: the images of one request over two encoders against one.

Both fleets run all the time and are asked in turns. Every worker is pinned to a core: the two
encoders to one each, so that the second brings a core and not just a process. Each encoder has one
preprocessing process, on its own core. The tower's weights are random and it is large enough that
nearly all of TTFT is encoding.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.harness import interleave, ratio, typical
from bench.image_fleet import FirstToken, ImageFleet, image_fleet, noise_image
from bench.outcome import Outcome
from bench.vision_model import Tower, make_vision_model


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--images", type=int, default=8, help="images of one request")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of A B B A")
    parser.add_argument("--depth", type=int, default=12, help="layers of the tower")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="little of everything")


def run(options: argparse.Namespace) -> Outcome:
    """Measures one and two encoders."""
    if options.quick:
        options.rounds, options.depth = 2, min(options.depth, 4)
    tower = Tower(depth=options.depth)
    answers: dict[str, list[FirstToken]] = {"one": [], "two": []}
    with tempfile.TemporaryDirectory(prefix="epd-bench-model-") as folder:
        model = make_vision_model(Path(folder), tower)
        flags = {"router": ["--encode-overlap=false"]}  # its account shows encoding on its own
        with (
            image_fleet(model, flags=flags) as one,
            image_fleet(model, encoders=2, flags=flags) as two,
        ):
            for fleet in (one, two):
                fleet.pin_encoders()  # the rest waits while images are encoded

            def measure(name: str, fleet: ImageFleet, seed: int) -> float:
                first = seed * 10_000 + len(answers[name]) * options.images
                images = [noise_image(tower.image_side, first + n) for n in range(options.images)]
                answers[name].append(fleet.ask(images))
                return answers[name][-1].ttft_ms

            arms = {
                "two": lambda seed: measure("two", two, seed),
                "one": lambda seed: measure("one", one, seed),
            }
            samples = interleave(arms, options.rounds, options.seed)
    found = ratio(samples, "two", "one")
    share = {name: round(median(map(_encode_share, of)), 3) for name, of in answers.items()}
    table = Table(title=f"{options.images} images of one request")
    for column in ("encoders", "TTFT ms", "of it encoding"):
        table.add_column(column, justify="right")
    for name in ("one", "two"):
        table.add_row(name, f"{typical(samples, name):.0f}", f"{share[name]:.0%}")
    Console().print(table)
    result = {
        "ttft_two_over_one": round(found.value, 3),
        "interval": [round(found.low, 3), round(found.high, 3)],
        "ttft_ms": {name: round(typical(samples, name), 1) for name in ("one", "two")},
        "encode_share_of_ttft": share,
        "images": options.images,
    }
    return Outcome(result, samples)


def _encode_share(answer: FirstToken) -> float:
    """Encoding and preprocessing, and waiting for them, as a share of the whole TTFT."""
    encoding = sum(
        ms for stage, ms in answer.stages_ms.items() if stage in ("encoder.encode", "encoder.queue")
    )
    return encoding / answer.ttft_ms
