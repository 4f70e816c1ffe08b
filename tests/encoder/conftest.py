from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.encoding.encode_batcher import EncodeBatcher, EncodeJob
from epd.encoding.encoder import Encoder
from epd.encoding.encoding_config import EncodingConfig
from epd.engine.families.base import ModelFamily
from epd.engine.families.registry import load_family
from epd.engine.model_digest import model_digest
from epd.engine.vision_runner import VisionRunner
from tests.encoder.calls import Caller
from tests.encoder.watched import Watched
from tests.support.tiny_model import make_tiny_qwen2vl

MakeEncoder = Callable[..., Awaitable[Encoder]]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen2vl(tmp_path_factory.mktemp("tiny-qwen2vl"))


@pytest.fixture(scope="session")
def family(model_folder: Path) -> ModelFamily:
    return load_family(model_folder)


@pytest.fixture(scope="session")
def vision(family: ModelFamily) -> VisionRunner:
    device = torch.device("cpu")
    return VisionRunner(family, family.load_vision(torch.float32, device), device)


@pytest.fixture(scope="session")
def digest_of_model(model_folder: Path) -> str:
    return model_digest(model_folder)


@pytest.fixture
async def make_encoder(
    family: ModelFamily, vision: VisionRunner, digest_of_model: str
) -> AsyncIterator[MakeEncoder]:
    """Starts encoders with the settings given; each must end without a byte unaccounted for."""
    async with AsyncExitStack() as stack:

        async def make(vision: Any = vision, **settings: Any) -> Encoder:
            encoder = Encoder(family, vision, digest_of_model, EncodingConfig(**settings))
            await encoder.start()
            stack.push_async_callback(encoder.stop)
            stack.callback(encoder.check_integrity)
            return encoder

        yield make


@pytest.fixture(scope="session")
def caller(family: ModelFamily, digest_of_model: str) -> Caller:
    return Caller(family.processor_digest, digest_of_model)


@pytest.fixture
def watched(make_encoder: MakeEncoder, vision: VisionRunner) -> Iterator[Watched]:
    """The vision half to hand to ``make_encoder``; its gate opens before the encoders stop."""
    watched = Watched(vision)
    yield watched
    watched.gate.set()


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[EncodeJob]:
    """Every image that has come as far as the vision tower's queue."""
    jobs: list[EncodeJob] = []
    submit = EncodeBatcher.submit

    def noted(batcher: EncodeBatcher, job: EncodeJob) -> None:
        submit(batcher, job)
        jobs.append(job)

    monkeypatch.setattr(EncodeBatcher, "submit", noted)
    return jobs
