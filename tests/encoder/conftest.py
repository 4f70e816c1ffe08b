from pathlib import Path

import pytest

from tests.support.tiny_model import make_tiny_qwen2vl


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen2vl(tmp_path_factory.mktemp("tiny-qwen2vl"))
