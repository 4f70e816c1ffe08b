"""Fixtures of the router's tests."""

from pathlib import Path

import pytest

from tests.router.fake_workers import Fabric, FakeDecode, FakeEncoder, FakePrefill
from tests.router.model_folder import make_model_folder


class Fleet:
    """One worker of each role."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.encoder = FakeEncoder(self.fabric)
        self.prefill = FakePrefill(self.fabric)
        self.prefill.encoder = self.encoder
        self.decode = FakeDecode(self.fabric)
        self.workers = [self.encoder, self.prefill, self.decode]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()
