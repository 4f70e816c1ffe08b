"""Train or evaluate the demonstration model ``shapes-vl`` (see the package ``shapes_vl``)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from shapes_vl.card import update_card
from shapes_vl.evaluate import evaluate, table
from shapes_vl.plan import Plan
from shapes_vl.train import train


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="model folder to write (or to evaluate)")
    parser.add_argument("--eval-only", action="store_true", help="evaluate an existing folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Plan.steps, help="optimizer steps")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--sight-steps", type=int, default=Plan.sight_steps, help="first phase")
    parser.add_argument("--sight-minutes", type=float, default=float("inf"), help="first phase")
    parser.add_argument("--card", action="store_true", help="write the accuracy to the model card")
    parser.add_argument("--state", type=Path, help="file to save to and to resume from")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=200, help="test questions of each kind")
    arguments = parser.parse_args()
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "20000")  # see shapes_vl.batch
    torch.set_num_threads(arguments.threads)
    if not arguments.eval_only:
        train(
            Plan(
                folder=arguments.folder,
                seed=arguments.seed,
                steps=arguments.steps,
                minutes=arguments.minutes,
                sight_steps=arguments.sight_steps,
                sight_minutes=arguments.sight_minutes,
                state=arguments.state,
                threads=arguments.threads,
            )
        )
    accuracy = table(evaluate(arguments.folder, arguments.seed + 1_000_000, arguments.samples))
    print(accuracy)
    if arguments.card:
        update_card(arguments.folder, accuracy)


if __name__ == "__main__":
    main()
