"""What a model folder's configuration says about special tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_IMAGE_TOKEN_KEYS = ("image_token_id", "image_token_index")


@dataclass(frozen=True)
class ModelFacts:
    """``end_ids`` end an answer; ``image_token_id`` stands for an image in a rendered prompt and
    ``video_token_id`` for a video, None where the model has none."""

    end_ids: frozenset[int]
    image_token_id: int | None
    video_token_id: int | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelFacts":
        """Reads ``config.json`` and, where it is there, ``generation_config.json``.

        Raises:
            FileNotFoundError: the folder has no ``config.json``.
        """
        config = json.loads((folder / "config.json").read_text("utf-8"))
        generation_file = folder / "generation_config.json"
        generation = (
            json.loads(generation_file.read_text("utf-8")) if generation_file.exists() else {}
        )
        end = generation.get("eos_token_id", config.get("eos_token_id"))
        return cls(
            end_ids=_ids(end),
            image_token_id=next(
                (config[key] for key in _IMAGE_TOKEN_KEYS if config.get(key) is not None), None
            ),
            video_token_id=_known(config.get("video_token_id"), config),
        )


def _known(token: int | None, config: dict[str, Any]) -> int | None:
    """The token, unless the vocabulary ends before it: classes write defaults of larger models."""
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return None if token is None or (size is not None and token >= size) else token


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
