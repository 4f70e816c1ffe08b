"""What a model family has to say about itself. A new family is a new file beside this one."""

import abc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from epd.engine.requests import PromptImage
from epd.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import PretrainedConfig

#: Patch grid of an image, (temporal, height, width) in patches before merging.
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class ImagePlan:
    """The place one image takes in a prompt, known from its size alone.

    The ``anchor_token_id`` of the rendered prompt is replaced by ``placeholder_ids``, of which
    ``embedding_tokens`` take one row of the embedding each. ``position_delta`` is the next rope
    position after the image minus the next token index; it adds up over images.
    """

    grid: Grid
    anchor_token_id: int
    placeholder_ids: tuple[int, ...]
    position_delta: int
    embedding_tokens: int


@dataclass(frozen=True)
class PixelInput:
    """A preprocessed image: ``patches`` is float32 [patches, features]."""

    patches: npt.NDArray[np.float32]
    grid: Grid


@dataclass(frozen=True)
class FrameSettings:
    """How a video's frames become patches.

    Each is resized to ``size`` (width, height); ``options`` are the image processor's where videos
    differ from images; ``temporal_patch_size`` frames make one temporal patch, the last frame
    repeated where some are missing.
    """

    size: tuple[int, int]
    options: Mapping[str, Any]
    temporal_patch_size: int


@dataclass(frozen=True)
class AttentionShape:
    """Attention of the whole language model, over all ranks."""

    layer_count: int
    query_head_count: int
    kv_head_count: int
    head_dim: int


@dataclass(frozen=True)
class LanguageModules:
    """The language half: ``body`` is all layers and the final norm, without embedding or head."""

    embed_tokens: "torch.nn.Module"
    body: "torch.nn.Module"
    lm_head: "torch.nn.Module"


class ModelFamily(abc.ABC):
    """One model folder as its family reads it. Text-only unless the image methods are overridden.

    Cheap to make: reads configuration files, never weights.
    """

    #: ``model_type`` in config.json.
    name: str
    #: Rows of :meth:`positions`: 1, or 3 for multimodal rope.
    position_axes: int = 1
    #: Placeholders with this id take one row of an image's embedding each.
    embedding_token_id: int | None = None
    #: The same for videos; None for a model without.
    video_token_id: int | None = None

    def __init__(self, folder: Path, config: "PretrainedConfig") -> None:
        self.folder = folder
        self.config = config

    @property
    def text_config(self) -> Any:
        """Configuration of the language half."""
        return self.config.get_text_config()

    @property
    def accepts_images(self) -> bool:
        """Whether requests may hold images."""
        return self.embedding_token_id is not None

    @property
    def embedding_token_ids(self) -> list[int]:
        """All ids that take a row of an embedding."""
        tokens = (self.embedding_token_id, self.video_token_id)
        return [token for token in tokens if token is not None]

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together."""
        return int(self.text_config.max_position_embeddings)

    @property
    def hidden_size(self) -> int:
        """Features of one token."""
        return int(self.text_config.hidden_size)

    @property
    def feature_levels(self) -> int:
        """Levels of features that an image has besides its embedding proper (DeepStack)."""
        return 0

    @property
    def embedding_features(self) -> int:
        """Features of one row of an image's embedding: those of a token, then of each level."""
        return self.hidden_size * (1 + self.feature_levels)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.text_config.vocab_size)

    @property
    def attention_shape(self) -> AttentionShape:
        """Heads and layers."""
        text = self.text_config
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return AttentionShape(
            text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads, head_dim
        )

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an output, from generation_config.json as ``generate`` reads them."""
        path = self.folder / "generation_config.json"
        ends = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ends is None:
            ends = self.text_config.eos_token_id
        return frozenset([ends] if isinstance(ends, int) else ends or [])

    def positions(
        self,
        token_ids: Sequence[int],
        images: Sequence[PromptImage],
        position_delta: int,
        start: int,
        end: int,
    ) -> npt.NDArray[np.int64]:
        """Rope positions [position_axes, end - start] of tokens ``start`` to ``end``.

        ``token_ids`` is the sequence up to ``end`` at least. ``position_delta`` is the sum over all
        images; images that the range touches or precedes need their grid.
        """
        return np.arange(start, end, dtype=np.int64)[None] + position_delta

    def level_arguments(
        self, rows: "torch.Tensor", levels: "torch.Tensor", token_count: int
    ) -> dict[str, Any]:
        """What the language body is called with for images' further levels.

        Args:
            rows: Rising indexes of the step's tokens that are rows of images.
            levels: [feature_levels, rows, hidden].
            token_count: Tokens of the step.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def load_language(self, dtype: "torch.dtype", device: "torch.device") -> LanguageModules:
        """Reads the language half from disk, and nothing else."""

    def plan_image(self, grid: Grid) -> ImagePlan:
        """The place an image of this patch grid takes."""
        raise self._no_images()

    def plan_video(self, grid: Grid) -> ImagePlan:
        """The place a video of this patch grid takes."""
        raise self._no_videos()

    def plan_placed(self, grid: Grid, placed: Sequence[int]) -> ImagePlan:
        """The plan that this run of placeholders must be the place of.

        Raises:
            InvalidRequestError: no image or video has this grid, or this run.
        """
        if self.video_token_id is not None and placed[0] == self.video_token_id:
            return self.plan_video(grid)
        return self.plan_image(grid)

    def plan_video_from_size(
        self, timestamps_s: Sequence[float], width: int, height: int
    ) -> ImagePlan:
        """The place a video of frames of this size takes, before it is decoded.

        Args:
            timestamps_s: When each frame is shown, in seconds.
            width: Of every frame, in pixels.
            height: Of every frame, in pixels.

        Raises:
            UnsupportedFeatureError: the model takes no videos.
            InvalidRequestError: it takes none of this shape.
        """
        raise self._no_videos()

    def frame_settings(self, grid: Grid) -> "FrameSettings":
        """How the folder's image processor is to treat the frames of a video of this grid."""
        raise self._no_videos()

    def plan_from_size(self, width: int, height: int) -> ImagePlan:
        """The place an image of this many pixels takes, before it is decoded.

        Raises:
            InvalidRequestError: the model takes no image of this shape.
        """
        raise self._no_images()

    def pixel_size(self, grid: Grid) -> tuple[int, int]:
        """Width and height that the image processor resizes an image of this grid to."""
        raise self._no_images()

    def pixel_input(self, processed: Mapping[str, npt.NDArray[Any]]) -> PixelInput:
        """Patches out of what the folder's own image processor answers for one image."""
        raise self._no_images()

    def preprocess(self, image: "Image") -> PixelInput:
        """Patches of an upright RGB image. Slow; pure, so it may run in another process."""
        raise self._no_images()

    @property
    def processor_digest(self) -> str:
        """Digest of all that decides :meth:`preprocess`, hexadecimal; empty without images."""
        return ""

    def load_vision(self, dtype: "torch.dtype", device: "torch.device") -> "torch.nn.Module":
        """Reads vision tower and projector from disk, and nothing else.

        The module maps (patches, grids [images, 3]) to embeddings [tokens, embedding_features], in
        order.
        """
        raise self._no_images()

    def _no_videos(self) -> UnsupportedFeatureError:
        return UnsupportedFeatureError(
            f"the model ({self.name}) takes no videos: it has no video token",
            reason="VIDEO_UNSUPPORTED",
        )

    def _no_images(self) -> UnsupportedFeatureError:
        return UnsupportedFeatureError(
            f"the model ({self.name}) takes no images", reason="IMAGES_UNSUPPORTED"
        )
