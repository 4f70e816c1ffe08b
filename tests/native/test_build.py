"""The kernels are compiled once, by one of several processes, and never half."""

import subprocess
import sys
from pathlib import Path

import pytest

from epd.engine.native import build
from epd.engine.native.build import NativeBuildError, cpu_level, library_path
from epd.engine.native.library import NativeLibrary

LOAD = "import sys; from epd.engine.native.build import *; print(library_path(Path(sys.argv[1])))"


@pytest.mark.usefixtures("compiled")
def test_several_processes_at_once_compile_one_library(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate(timeout=250)[0].strip() for process in processes}
    assert len(paths) == 1
    assert len(list(tmp_path.glob("*.so"))) == 1
    NativeLibrary(threads=1, path=Path(paths.pop()))


@pytest.mark.usefixtures("compiled")
def test_a_changed_source_is_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    for path in build.SOURCE_FOLDER.iterdir():
        (sources / path.name).write_bytes(path.read_bytes())
    before = library_path(tmp_path / "cache")
    monkeypatch.setattr(build, "SOURCE_FOLDER", sources)
    assert library_path(tmp_path / "cache") == before
    (sources / "api.cpp").write_text((sources / "api.cpp").read_text() + "// changed\n")
    assert library_path(tmp_path / "cache") != before


@pytest.mark.usefixtures("compiled")
def test_a_compiler_error_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "api.cpp").write_text("this is not C++\n")
    monkeypatch.setattr(build, "SOURCE_FOLDER", tmp_path / "src")
    with pytest.raises(NativeBuildError, match=r"failed: .*error") as caught:
        library_path(tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_cache_folder_that_cannot_be_made_is_a_build_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeBuildError, match="cannot be used"):
        library_path(tmp_path / "file" / "cache")


@pytest.mark.usefixtures("compiled")
def test_a_library_that_was_brought_along_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PREBUILT_FOLDER", tmp_path)
    build.build(tmp_path, cpu_level())
    monkeypatch.setenv("PATH", "")
    assert library_path(tmp_path / "cache").parent == tmp_path
