"""Model folders with random weights: same files as a real Hugging Face folder, a fraction of a MB.

The weights are drawn wider than a trained model's start, so that greedy output varies from token to
token and a wrong position or a lost block shows at once.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
BYTE_COUNT = 256
END_OF_TEXT, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(
    BYTE_COUNT, BYTE_COUNT + len(SPECIAL_TOKENS)
)
VOCAB_SIZE = BYTE_COUNT + len(SPECIAL_TOKENS)
CONTEXT_LENGTH = 4096

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


#: Which tokens mean what to both Qwen families.
_QWEN_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE_PAD,
    "video_token_id": VIDEO_PAD,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "bos_token_id": None,
    "eos_token_id": IM_END,
    "pad_token_id": END_OF_TEXT,
}


def _qwen_text(mrope_section: list[int], **rope: Any) -> dict[str, Any]:
    """The text side of both Qwen families: 3 layers, 4 query heads and 2 KV heads of 32."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": mrope_section,
            **rope,
        },
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
    }


def make_tiny_qwen2vl(folder: Path, seed: int = 0) -> Path:
    """Saves a Qwen2-VL of 2 vision and 3 text layers (4 query heads, 2 KV heads of 32)."""
    config = Qwen2VLConfig(
        text_config=_qwen_text([4, 6, 6]),
        vision_config={"depth": 2, "embed_dim": 64, "num_heads": 2, "hidden_size": 128},
        tie_word_embeddings=False,
        **_QWEN_TOKENS,
    )
    _save(Qwen2VLForConditionalGeneration(config), folder, seed)
    size = {"shortest_edge": 56 * 56, "longest_edge": 168 * 168}
    Qwen2VLImageProcessorPil(size=size).save_pretrained(folder)
    return folder


def make_tiny_qwen3vl(folder: Path, seed: int = 0) -> Path:
    """Saves a Qwen3-VL of 4 vision layers, two of them DeepStack levels, and 3 text layers."""
    config = Qwen3VLConfig(
        text_config=_qwen_text([6, 5, 5], mrope_interleaved=True),
        vision_config={
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [1, 2],
        },
        tie_word_embeddings=False,
        **_QWEN_TOKENS,
    )
    _save(Qwen3VLForConditionalGeneration(config), folder, seed)
    size = {"shortest_edge": 64 * 64, "longest_edge": 192 * 192}
    Qwen2VLImageProcessorPil(size=size, patch_size=16).save_pretrained(folder)
    return folder


def make_tiny_llama(folder: Path, seed: int = 0) -> Path:
    """Saves a text-only Llama with tied embeddings (4 query heads, 2 KV heads of 32)."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT,
        eos_token_id=IM_END,
        pad_token_id=END_OF_TEXT,
    )
    _save(LlamaForCausalLM(config), folder, seed)
    return folder


def _save(model: PreTrainedModel, folder: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                fan_in = parameter[0].numel()
                parameter.normal_(0.0, 1.5 * fan_in**-0.5, generator=generator)
            elif parameter.abs().max() == 0:  # biases; norms stay at one
                parameter.normal_(0.0, 0.1, generator=generator)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=IM_END, pad_token_id=END_OF_TEXT
    )
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
