"""The compiled kernels, or a visible reason for their absence."""

import pytest

from epd.engine.native.build import NativeBuildError
from epd.engine.native.library import NativeLibrary


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    try:
        return NativeLibrary(threads=1)
    except NativeBuildError as error:
        pytest.skip(f"no native kernels here: {error}")
