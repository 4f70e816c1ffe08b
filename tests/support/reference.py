"""What plain ``transformers`` answers: the whole model in this process, nothing of ours."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from epd.media import Video
from tests.support.video_reference import process_video, spelled_video


@dataclass(frozen=True)
class Question:
    """One user turn: image files first, then videos, then text."""

    images: tuple[bytes, ...]
    text: str
    videos: tuple[Video, ...] = ()


class Reference:
    """Greedy ``generate`` of a Qwen2-VL or Qwen3-VL folder in float32."""

    def __init__(self, folder: Path) -> None:
        # More threads than free cores spin against the services' own.
        torch.set_num_threads(1)
        self._model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self._model.generation_config.eos_token_id = None  # questions go past the end token
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self._pad = self._model.config.image_token_id
        self._video_pad = self._model.config.video_token_id
        self._spells_times = self._model.config.model_type == "qwen3_vl"

    def prompt_ids(self, question: Question, grids: Sequence[tuple[int, int, int]]) -> list[int]:
        """The rendered conversation with the placeholders of every image and video."""
        parts = [{"type": "image"} for _ in question.images]
        parts += [{"type": "video"} for _ in question.videos]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": [*parts, {"type": "text", "text": question.text}]}
        ]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        if not self._spells_times:
            return self._with_pads(text, grids, {self._pad, self._video_pad})
        count = len(question.images)
        whole, *after = text.split("<|video_pad|>")
        for video, grid, more in zip(question.videos, grids[count:], after, strict=True):
            whole += spelled_video(video, grid) + more
        return self._with_pads(whole, grids[:count], {self._pad})

    def _with_pads(
        self, text: str, grids: Sequence[tuple[int, int, int]], single: set[int]
    ) -> list[int]:
        """Token ids, each of the ``single`` ones repeated to fill its grid."""
        ids: list[int] = []
        left = iter(grids)
        for token in self._tokenizer.encode(text, add_special_tokens=False):
            count = math.prod(next(left)) // self._processor.merge_size**2 if token in single else 1
            ids += [token] * count
        return ids

    def greedy(self, question: Question, max_tokens: int) -> list[int]:
        """``max_tokens`` tokens, past any end token."""
        inputs: dict[str, torch.Tensor] = {}
        grids: list[tuple[int, int, int]] = []
        if question.images:
            files = [Image.open(io.BytesIO(data)).convert("RGB") for data in question.images]
            pixels = self._processor(images=files, return_tensors="pt")
            grids = [tuple(grid) for grid in pixels["image_grid_thw"].tolist()]
            inputs |= {key: pixels[key] for key in ("pixel_values", "image_grid_thw")}
        if question.videos:
            made = [
                process_video(self._processor, video.frames, bounded_together=self._spells_times)
                for video in question.videos
            ]
            grids += [grid for _, grid in made]
            inputs["pixel_values_videos"] = torch.cat([pixels for pixels, _ in made])
            inputs["video_grid_thw"] = torch.tensor([grid for _, grid in made])
        ids = torch.tensor([self.prompt_ids(question, grids)])
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == self._pad).int() + 2 * (ids == self._video_pad).int(),
                max_new_tokens=max_tokens,
                do_sample=False,
                **inputs,
            )
        answer: list[int] = output[0, ids.shape[1] :].tolist()
        return answer
