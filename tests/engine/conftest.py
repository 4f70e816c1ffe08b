"""Tiny models, made once per test run."""

from pathlib import Path

import pytest

from tests.support.tiny_model import make_tiny_llama, make_tiny_qwen2vl, make_tiny_qwen3vl


@pytest.fixture(scope="session")
def tiny_qwen2vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen2vl(tmp_path_factory.mktemp("qwen2vl"))


@pytest.fixture(scope="session")
def tiny_qwen3vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3vl(tmp_path_factory.mktemp("qwen3vl"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))
