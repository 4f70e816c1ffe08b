"""From single pictures' patches to those of a video.

The image processor makes of a picture the patches of a video in which nothing moves: every
temporal patch holds the picture ``temporal_patch_size`` times. A video's patch holds neighbouring
frames instead; all else is the same. So each frame is processed as a picture and woven in.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

CHANNELS = 3


class FrameWeaver:
    """Collects the frames of one video in order.

    Args:
        frames: How many will come.
        temporal_patch_size: Frames per temporal patch; the last is repeated to fill the last patch.
    """

    def __init__(self, frames: int, temporal_patch_size: int) -> None:
        self._frames = frames
        self._depth = temporal_patch_size
        self._temporal = -(-frames // temporal_patch_size)
        self._woven: npt.NDArray[Any] | None = None
        self._grid = (0, 0)
        self._count = 0

    def add(self, patches: npt.NDArray[Any], height: int, width: int) -> None:
        """The next frame: [height * width, channels * depth * area] as a picture has it.

        Raises:
            ValueError: its grid is not that of the frames before.
        """
        picture = patches.reshape(height * width, CHANNELS, self._depth, -1)[:, :, 0]
        if self._woven is None:
            shape = (self._temporal, height * width, CHANNELS, self._depth, picture.shape[-1])
            self._woven = np.empty(shape, patches.dtype)
            self._grid = (height, width)
        if self._grid != (height, width):
            raise ValueError(f"a frame of grid {(height, width)} among those of {self._grid}")
        patch, place = divmod(self._count, self._depth)
        self._count += 1
        # The last frame also fills the places that no frame is left for.
        end = place + 1 if self._count < self._frames else self._depth
        self._woven[patch, :, :, place:end] = picture[:, :, None]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What an image processor would answer for it."""
        assert self._woven is not None
        assert self._count == self._frames
        rows = self._temporal * self._woven.shape[1]
        return {
            "pixel_values": self._woven.reshape(rows, -1),
            "image_grid_thw": np.array([[self._temporal, *self._grid]], dtype=np.int64),
        }
