"""The compiled kernels, or a visible reason for their absence."""

import platform

import pytest

from epd.engine.native.build import (
    X86_LEVELS,
    NativeBuildError,
    build,
    cpu_level,
    default_cache_folder,
)
from epd.engine.native.library import NativeLibrary


def levels_of_this_cpu() -> list[str]:
    """All kinds of code this CPU runs: the best, and on x86 all simpler ones."""
    best = cpu_level()
    levels = list(X86_LEVELS)
    return levels[levels.index(best) :] if platform.machine() == "x86_64" else [best]


@pytest.fixture(scope="session", params=levels_of_this_cpu())
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    """The kernels as each kind of CPU gets them."""
    try:
        return NativeLibrary(threads=1, path=build(default_cache_folder(), request.param))
    except NativeBuildError as error:
        pytest.skip(f"no native kernels here: {error}")


@pytest.fixture(scope="session")
def compiled() -> None:
    """For tests that use this CPU's own kernels."""
    try:
        NativeLibrary(threads=1)
    except NativeBuildError as error:
        pytest.skip(f"no native kernels here: {error}")
