"""Compiles the native kernels: once per source, flags and kind of CPU, kept in a cache folder.

A wheel or image for machines without a compiler brings them: ``python -m epd.engine.native.build``
puts a library for every kind of CPU beside this file, and :func:`library_path` finds the right one.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent / "src"
#: Libraries that a package or an image brings along.
PREBUILT_FOLDER = Path(__file__).parent / "prebuilt"
COMPILE_TIMEOUT_S = 300.0

# Not -ffast-math: in a shared library it makes the whole process flush denormals to zero, and it
# lets the compiler drop the checks that keep masked scores at exactly zero weight.
FLAGS = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-fPIC", "-Wall", "-Wextra", "-Wno-psabi"),
)

#: Newest first; what /proc/cpuinfo must list for each.
X86_LEVELS: Mapping[str, frozenset[str]] = {
    "x86-64-v4": frozenset(
        ["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma"]
    ),
    "x86-64-v3": frozenset(["avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"]),
    "x86-64": frozenset(),
}


class NativeBuildError(Exception):
    """The kernels cannot be had here; the message says why in one line."""


def default_cache_folder() -> Path:
    """``~/.cache/epd/native``."""
    return Path.home() / ".cache" / "epd" / "native"


def library_path(cache: Path | None = None) -> Path:
    """The library for this CPU: brought along, or compiled earlier, or compiled now.

    Raises:
        NativeBuildError: no compiler, or it failed.
    """
    level = cpu_level()
    prebuilt = PREBUILT_FOLDER / _file_name(level)
    return prebuilt if prebuilt.is_file() else build(cache or default_cache_folder(), level)


def build(folder: Path, level: str) -> Path:
    """Compiles for one kind of CPU unless the folder has it. Safe in several processes at once.

    Raises:
        NativeBuildError: no compiler, it failed, or the folder cannot be written.
    """
    target = folder / _file_name(level)
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait and then find it done
            if not target.is_file():
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    result = Path(scratch) / target.name
                    _compile(result, level)
                    os.replace(result, target)
    except OSError as error:
        raise NativeBuildError(f"{folder} cannot be used: {error}") from error
    return target


def cpu_level() -> str:
    """The -march level of this machine, or its architecture where there are no levels."""
    if platform.machine() != "x86_64":
        return platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return next(level for level, needed in X86_LEVELS.items() if needed <= set(flags))


def _sources() -> list[Path]:
    return sorted(path for path in SOURCE_FOLDER.iterdir() if path.suffix in {".h", ".cpp"})


def _flags(level: str) -> list[str]:
    return [*FLAGS, f"-march={level}"] if level in X86_LEVELS else list(FLAGS)


def _file_name(level: str) -> str:
    digest = hashlib.sha256(" ".join(_flags(level)).encode())
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"kernels-{level}-{digest.hexdigest()[:16]}.so"


def _compile(target: Path, level: str) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NativeBuildError("no C++ compiler (g++ or c++) on the path")
    unit, compiled = str(SOURCE_FOLDER / "api.cpp"), str(target.with_suffix(".o"))
    try:
        _run([compiler, *_flags(level), "-c", unit, "-o", compiled])
        # Linked without an OpenMP library: it is torch's that the kernels must find in the process.
        _run([compiler, "-shared", compiled, "-o", str(target)])
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"{compiler} took over {COMPILE_TIMEOUT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        first_line = (error.stderr.strip().splitlines() or ["no output"])[0]
        raise NativeBuildError(f"{compiler} failed: {first_line}") from error


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)


def main() -> None:
    """Fills a folder with a library for every kind of CPU of this architecture."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PREBUILT_FOLDER
    levels = list(X86_LEVELS) if platform.machine() == "x86_64" else [cpu_level()]
    for level in levels:
        print(build(folder, level))


if __name__ == "__main__":
    main()
