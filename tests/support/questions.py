"""Seeded questions for end-to-end tests: 0 to 4 images, short and long texts."""

import io
import random

from PIL import Image

from epd.media import Video
from tests.support.reference import Question

WORDS = ("the", "red", "circle", "is", "at", "top", "left", "of", "a", "blue", "square", "where")


def make_image(random_source: random.Random) -> bytes:
    """A PNG of 60 to 170 pixels a side: coarse random patches, so that files stay small."""
    return _picture(random_source, random_source.randint(60, 170), random_source.randint(60, 170))


def make_video(random_source: random.Random, frames: int) -> Video:
    """Frames of one size, each another picture, 0.4 s apart."""
    width, height = random_source.randint(60, 170), random_source.randint(60, 170)
    files = tuple(_picture(random_source, width, height) for _ in range(frames))
    return Video(files, tuple(0.4 * index for index in range(frames)))


def make_long_video(random_source: random.Random) -> Video:
    """30 temporal patches of 4 tokens: in time it reaches behind a short question."""
    files = tuple(_picture(random_source, 56, 56) for _ in range(60))
    return Video(files, tuple(0.4 * index for index in range(60)))


def _picture(random_source: random.Random, width: int, height: int) -> bytes:
    cells = (random_source.randint(2, 6), random_source.randint(2, 6))
    small = Image.frombytes("RGB", cells, random_source.randbytes(3 * cells[0] * cells[1]))
    file = io.BytesIO()
    small.resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def make_questions(count: int, seed: int, *, long_every: int = 8) -> list[Question]:
    """``count`` questions; image counts go round 0 to 4, every ``long_every``-th is very long.

    A very long one has more than 1024 tokens with a byte-level tokenizer; others are short.
    """
    random_source = random.Random(seed)
    questions = []
    for index in range(count):
        images = tuple(make_image(random_source) for _ in range(index % 5))
        length = random_source.randint(1100, 1500) if index % long_every == 3 else 40
        text = ""
        while len(text) < length:
            text += random_source.choice(WORDS) + " "
        questions.append(Question(images, text))
    return questions
