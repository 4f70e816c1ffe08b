"""How Qwen3-VL's video processor sizes frames, and how its prompt spells their times.

A video stands in the prompt as one vision segment per temporal patch, each after its time in text:
``<0.2 seconds><|vision_start|><|video_pad|>...<|vision_end|><1.0 seconds>...``, all of it in the
place of the one pad token between the chat template's own markers, as transformers writes it.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from epd.engine.families.qwen2_vl_video import Qwen2VLVideoSettings


class Qwen3VLVideoSettings(Qwen2VLVideoSettings):
    """As Qwen2-VL's, but bounds on pixels are of all frames together."""

    default_pixels = (128 * 32 * 32, 32 * 32 * 768)
    default_max_tokens = 768

    def frame_size(self, frames: int, height: int, width: int, factor: int) -> tuple[int, int]:
        most = self._longest
        if self._capped:
            share = min(self._max_tokens * factor * factor, most // frames)
            most = max(share, int(self._shortest * 1.05)) * frames
        size: tuple[int, int] = smart_resize(
            num_frames=frames,
            height=height,
            width=width,
            temporal_factor=self.temporal_patch_size,
            factor=factor,
            min_pixels=self._shortest,
            max_pixels=most,
        )
        return size


class TimeSpeller:
    """Tokens of a temporal patch's time.

    Args:
        folder: The model folder, for its tokenizer.
        temporal_patch_size: Frames per temporal patch.
    """

    def __init__(self, folder: Path, temporal_patch_size: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._depth = temporal_patch_size

    def spell(self, timestamps_s: Sequence[float]) -> list[list[int]]:
        """Token ids per temporal patch, from each frame's time in seconds."""
        times = [*timestamps_s]
        times += [times[-1]] * (-len(times) % self._depth)
        # A patch's time is the middle between its first and last frame.
        middles = [
            (times[first] + times[first + self._depth - 1]) / 2
            for first in range(0, len(times), self._depth)
        ]
        return [
            self._tokenizer.encode(f"<{middle:.1f} seconds>", add_special_tokens=False).ids
            for middle in middles
        ]
