"""Models of the end-to-end tests; the fleets themselves are in tests.support."""

from pathlib import Path

import pytest

from tests.support.reference import Reference
from tests.support.tiny_model import make_tiny_qwen2vl


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2-VL with random weights."""
    return make_tiny_qwen2vl(tmp_path_factory.mktemp("tiny-qwen2vl"))


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    """The same model in plain transformers."""
    return Reference(model)
