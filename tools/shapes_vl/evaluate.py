"""Evaluation of a saved folder with plain transformers: picture, processor, greedy generation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from . import questions
from .questions import Turn
from .render import render
from .scene import changed_scene, random_scene

_IMAGE = "<|image_pad|>"


@dataclass(frozen=True)
class Case:
    """Fresh pictures with one question; ``group`` is a row of the accuracy table."""

    group: str
    pictures: list[Image.Image]
    turn: Turn


class Answerer:
    """The released folder, loaded as anybody would load it."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    @torch.no_grad()
    def answer(self, pictures: list[Image.Image], question: str) -> str:
        """Greedy answer to one question about some pictures."""
        content: list[Any] = [
            *({"type": "image"} for _ in pictures),
            {"type": "text", "text": question},
        ]
        chat: list[dict[str, Any]] = [{"role": "user", "content": content}]
        prompt = self.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        assert isinstance(prompt, str)
        images = self.image_processor(images=pictures, return_tensors="pt")
        merged = self.image_processor.merge_size**2
        pieces = prompt.split(_IMAGE)
        text = pieces[0]
        for grid, piece in zip(images["image_grid_thw"].tolist(), pieces[1:], strict=True):
            text += _IMAGE * (grid[1] * grid[2] // merged) + piece
        inputs = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
        ids = inputs["input_ids"]
        kinds = (ids == self.model.config.image_token_id).int()
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=kinds,
            pixel_values=images["pixel_values"],
            image_grid_thw=images["image_grid_thw"],
            max_new_tokens=64,
            do_sample=False,
        )
        tokens = output[0, ids.shape[1] :].tolist()
        ended = bool(tokens) and tokens[-1] == self.model.generation_config.eos_token_id
        answer = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return answer if ended else answer + " [no end]"


def draw_cases(seed: int, samples: int) -> list[Case]:
    """``samples`` cases of every kind; "which" is split by the number of images."""
    rng = np.random.default_rng(seed)
    cases: list[Case] = []
    for _ in range(samples):
        for kind in questions.SINGLE_KINDS:
            scene = random_scene(rng)
            while not questions.unique_places(scene):
                scene = random_scene(rng)
            if kind == "count":
                turn = questions.count_turn(rng, scene)
            elif kind == "what":
                turn = questions.what_turn(rng, scene, int(rng.integers(4)))
            elif kind == "where":
                places = questions.unique_places(scene)
                turn = questions.where_turn(rng, scene, places[rng.integers(len(places))])
            else:
                turn = questions.describe_turn(rng, scene)
            cases.append(Case(kind, [render(rng, scene)], turn))
        for count in (2, 3, 4):
            scenes = [random_scene(rng) for _ in range(count)]
            found = questions.which_turn(rng, scenes)
            if found is not None:
                pictures = [render(rng, scene) for scene in scenes]
                cases.append(Case(f"which of {count}", pictures, found))
        before = random_scene(rng)
        after = before if rng.random() < 0.25 else changed_scene(rng, before)
        turn = questions.different_turn(rng, before, after)
        cases.append(Case("different", [render(rng, before), render(rng, after)], turn))
    return cases


def evaluate(folder: Path, seed: int, samples: int) -> dict[str, tuple[int, int]]:
    """Right answers and questions per group."""
    answerer = Answerer(folder)
    result: dict[str, tuple[int, int]] = {}
    for case in draw_cases(seed, samples):
        right, total = result.get(case.group, (0, 0))
        same = answerer.answer(case.pictures, case.turn.question) == case.turn.answer
        result[case.group] = (right + int(same), total + 1)
    return result


def table(result: dict[str, tuple[int, int]]) -> str:
    """The result as a Markdown table."""
    lines = ["| question | right | of | accuracy |", "| --- | --- | --- | --- |"]
    for group, (right, total) in result.items():
        lines.append(f"| {group} | {right} | {total} | {100 * right / total:.1f} % |")
    return "\n".join(lines)
