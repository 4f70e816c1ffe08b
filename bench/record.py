"""What a benchmark leaves behind: its samples and where they come from, but not who ran it."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "grpcio", "nixl-cu12", "numpy")


@dataclass(frozen=True)
class Provenance:
    """Enough to run it again; no host name, user, folder or environment."""

    command: str
    python: str
    cpu: str
    cores: int
    #: Processes that wanted a core in the minute before the start: above 0, it was not quiet.
    load_before: float
    packages: dict[str, str]


def provenance(argv: Sequence[str] = tuple(sys.argv[1:])) -> Provenance:
    """Describes this machine and this command."""
    return Provenance(
        command=shlex.join(["python", "-m", "bench", *_without_folders(argv)]),
        python=platform.python_version(),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        load_before=round(os.getloadavg()[0], 1),
        packages={name: found for name in PACKAGES if (found := _version(name))},
    )


def save(folder: Path, name: str, origin: Provenance, result: dict[str, Any], raw: Any) -> Path:
    """Writes ``NAME.json`` with the result, the raw samples and their provenance."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {"benchmark": name, "provenance": asdict(origin), "result": result, "raw": raw}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _without_folders(argv: Sequence[str]) -> list[str]:
    """Paths become their last part."""
    return [Path(part).name if "/" in part else part for part in argv]


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
