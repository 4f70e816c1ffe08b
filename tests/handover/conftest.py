"""Every behaviour of the hand-over is shown on NIXL and on the local transport."""

import pytest

from epd.transfer.local_backend import LocalFabric
from tests.handover.sides import make_pair


@pytest.fixture(params=["local", "nixl"])
def transport(request):
    return request.param


@pytest.fixture
def fabric():
    return LocalFabric()


@pytest.fixture
def make(transport, fabric):
    return lambda **sides: make_pair(transport, fabric, **sides)
