"""Records what transformers' own video processor makes of a video; needs torchvision.

``python -m tests.encoder.record_video`` writes the file that test_video.py compares with.
"""

from pathlib import Path

import numpy as np
from PIL import Image

RECORDED = Path(__file__).parent / "recorded" / "qwen2vl_video.npz"
#: The tiny model's; the frames are neither of these nor multiples of a patch, so they are resized.
SIZE = {"shortest_edge": 56 * 56, "longest_edge": 168 * 168}
#: Frames, width, height: an odd number of frames that grow, an even number that shrink.
VIDEOS = {"odd": (3, 50, 40), "even": (2, 300, 90)}


def frames_of(name: str) -> list[Image.Image]:
    """The frames of a video: colours that run and move."""
    count, width, height = VIDEOS[name]
    rows, columns = np.mgrid[0:height, 0:width]
    return [
        Image.fromarray(
            np.stack(
                [columns * 5 + 40 * time, rows * 3 - 20 * time, (rows + columns) * 2], axis=-1
            ).astype(np.uint8)
        )
        for time in range(count)
    ]


def main() -> None:
    """Writes the file."""
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    processor = Qwen2VLVideoProcessor(size=SIZE)
    mean, std = (
        np.array(v).repeat(2 * 14 * 14) for v in (processor.image_mean, processor.image_std)
    )
    arrays = {}
    for name in VIDEOS:
        made = processor(videos=[[np.asarray(f) for f in frames_of(name)]], return_tensors="np")
        levels = (made["pixel_values_videos"] * std + mean) * 255
        assert np.abs(levels - levels.round()).max() < 1e-2
        arrays[f"{name}_levels"] = levels.round().astype(np.uint8)
        arrays[f"{name}_grid"] = made["video_grid_thw"][0]
    RECORDED.parent.mkdir(exist_ok=True)
    np.savez_compressed(RECORDED, **arrays)


if __name__ == "__main__":
    main()
