"""The model: a very small Qwen2-VL, and the files that go with its weights."""

from __future__ import annotations

from typing import Final

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import (
    Qwen2VLTextConfig,
    Qwen2VLVisionConfig,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from .tokenizer import (
    END_OF_TEXT,
    IM_END,
    IMAGE_PAD,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    token_id,
)

PATCH_SIZE: Final = 14
MERGE_SIZE: Final = 2
MIN_PIXELS: Final = 168 * 168
MAX_PIXELS: Final = 196 * 196
IMAGE_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)  # as Qwen2-VL: the values of CLIP
IMAGE_STD: Final = (0.26862954, 0.26130258, 0.27577711)
CONTEXT: Final = 8192


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLConfig:
    """Sizes and token ids.

    ``rope_theta`` is low because positions only matter over a few hundred tokens, and because
    the width section of mrope has the slowest frequencies: with the usual base neighbouring
    columns of a picture this small would be indistinguishable.
    """

    def token(text: str) -> int:
        return token_id(tokenizer, text)

    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "mrope_section": [4, 6, 6],
            },
            "bos_token_id": None,
            "eos_token_id": token(IM_END),
            "pad_token_id": token(END_OF_TEXT),
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 4,
            "embed_dim": 128,
            "hidden_size": 192,
            "mlp_ratio": 4,
            "num_heads": 4,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": 2,
        },
        image_token_id=token(IMAGE_PAD),
        video_token_id=token(VIDEO_PAD),
        vision_start_token_id=token(VISION_START),
        vision_end_token_id=token(VISION_END),
        tie_word_embeddings=True,
    )
    # Also at the top, where generic code looks for them.
    config.update(
        {"bos_token_id": None, "eos_token_id": token(IM_END), "pad_token_id": token(END_OF_TEXT)}
    )
    config.architectures = [Qwen2VLForConditionalGeneration.__name__]
    config.dtype = torch.float32
    return config


def text_config(config: Qwen2VLConfig) -> Qwen2VLTextConfig:
    """The settings of the text layers."""
    assert isinstance(config.text_config, Qwen2VLTextConfig)
    return config.text_config


def vision_config(config: Qwen2VLConfig) -> Qwen2VLVisionConfig:
    """The settings of the vision tower."""
    assert isinstance(config.vision_config, Qwen2VLVisionConfig)
    return config.vision_config


def build_model(config: Qwen2VLConfig) -> Qwen2VLForConditionalGeneration:
    """Fresh weights, with a generation config that is greedy and stops at the end of a turn."""
    model = Qwen2VLForConditionalGeneration(config)  # in 32-bit floats
    text = text_config(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        max_new_tokens=64,
    )
    return model


def build_image_processor() -> Qwen2VLImageProcessorPil:
    """The pixel bounds bring every picture to about 36 to 49 tokens, whatever its size."""
    return Qwen2VLImageProcessorPil(
        image_mean=IMAGE_MEAN,
        image_std=IMAGE_STD,
        min_pixels=MIN_PIXELS,
        max_pixels=MAX_PIXELS,
        patch_size=PATCH_SIZE,
        merge_size=MERGE_SIZE,
        temporal_patch_size=2,
    )
