"""Small tokenizers of the kinds that model folders hold, trained on a few lines of text."""

import json

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from epd.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, isn't it?",
    "Grüße aus Zürich; 日本語 の テキスト と 漢字。",
    "emoji 👩‍👩‍👧‍👦 and 🏳️‍🌈 are long; numbers 0123456789",
    "def f(x):\n    return x * 2\n",
] * 4
CONTROL = ["<|start|>", "<|end|>", "<|image_pad|>"]


def byte_level() -> Tokenizer:
    """GPT-2, Qwen and Llama 3 style."""
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=CONTROL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return Tokenizer(tokenizer.to_str())


def sentencepiece_with_byte_fallback() -> Tokenizer:
    """Llama 2 style: words begin with a low line, unknown characters are spelled in bytes."""
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    tokenizer = HfTokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", *byte_tokens, *CONTROL], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS[:1], trainer)
    definition = json.loads(tokenizer.to_str())
    definition["model"].update(byte_fallback=True, fuse_unk=True)
    # Byte tokens belong to the vocabulary; they are no control tokens.
    definition["added_tokens"] = [
        token for token in definition["added_tokens"] if token["content"] not in byte_tokens
    ]
    tokenizer = HfTokenizer.from_str(json.dumps(definition))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(tokenizer.to_str())


def metaspace() -> Tokenizer:
    """T5 and XGLM style: a metaspace before each word, no byte fallback."""
    tokenizer = HfTokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", *CONTROL], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return Tokenizer(tokenizer.to_str())


def word_piece() -> Tokenizer:
    """BERT style, whose decoder removes spaces before punctuation afterwards."""
    tokenizer = HfTokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]"), "removed", invert=True)
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", *CONTROL], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(tokenizer.to_str())
