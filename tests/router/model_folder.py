"""A model folder as the router reads it: tokenizer, chat template, configuration; no weights."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKENS = ("<|end|>", "<|start|>", "<|image|>")
#: One token per byte, then the control tokens.
END, START, IMAGE = range(256, 259)
CONTEXT_LENGTH = 512
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|start|>' + message['role'] + ':' -}}
{%- for part in message['content'] -%}
{{- '<|image|>' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{{- '<|start|>assistant:' if add_generation_prompt -}}
"""


def make_model_folder(folder: Path) -> Path:
    """Writes the files."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = {"eos_token_id": END, "image_token_id": IMAGE}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def token_ids(text: str) -> list[int]:
    """Tokens of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {character: index for index, character in enumerate(alphabet)}
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [ids[character] for piece, _ in pieces for character in piece]
