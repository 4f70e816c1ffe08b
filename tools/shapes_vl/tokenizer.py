"""Tokenizer and chat template.

The pre-tokenizer is the one of Qwen2, whichever class loads the files, so that generic Qwen2
code tokenizes exactly as in training.  All 256 bytes are in the vocabulary: any text can be
encoded, though only the words of the task have tokens of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from . import questions
from .scene import changed_scene, random_scene

END_OF_TEXT: Final = "<|endoftext|>"
IM_START: Final = "<|im_start|>"
IM_END: Final = "<|im_end|>"
VISION_START: Final = "<|vision_start|>"
VISION_END: Final = "<|vision_end|>"
IMAGE_PAD: Final = "<|image_pad|>"
VIDEO_PAD: Final = "<|video_pad|>"
SPECIAL_TOKENS: Final = (
    END_OF_TEXT,
    IM_START,
    IM_END,
    VISION_START,
    VISION_END,
    IMAGE_PAD,
    VIDEO_PAD,
)
VOCABULARY_SIZE: Final = 512
_CORPUS_SEED: Final = 1

CHAT_TEMPLATE: Final = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' or 'video' in part -%}
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


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train byte-level BPE on generated questions and answers.

    The corpus is always the same one: whatever the seed of a training run, token ids never change.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(np.random.default_rng(_CORPUS_SEED)), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def token_id(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    """The id of a text that is one token."""
    token = tokenizer.convert_tokens_to_ids(text)
    assert isinstance(token, int)
    return token


def _corpus(rng: np.random.Generator) -> Iterator[str]:
    yield from _frame_words()
    for _ in range(4000):
        scene = random_scene(rng)
        after = changed_scene(rng, scene)
        turns: Iterable[questions.Turn | None] = (
            questions.count_turn(rng, scene),
            questions.what_turn(rng, scene, int(rng.integers(4))),
            questions.describe_turn(rng, scene),
            questions.which_turn(rng, [random_scene(rng) for _ in range(4)]),
            questions.different_turn(rng, scene, after),
            *(questions.where_turn(rng, scene, p) for p in questions.unique_places(scene)),
        )
        for turn in turns:
            if turn is not None:
                yield turn.question
                yield turn.answer


def _frame_words() -> Iterator[str]:
    """The words of the chat frame, often enough to become single tokens."""
    for _ in range(500):
        yield "user\n"
        yield "assistant\n"
        yield "system\n"
        yield "You are a helpful assistant."
