"""aiperf as it is published, in an environment of its own: its pins contradict this project's."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.process_group import run_command

VERSION = "0.13.0"
ENVIRONMENT_TIMEOUT_S = 120.0
#: 138 packages, of which some may have to be downloaded.
INSTALL_TIMEOUT_S = 420.0
#: A run takes about ten seconds on an idle machine, most of them imports in eight processes.
RUN_TIMEOUT_S = 180.0
#: Not passed on: our modules; and with the last two it takes a tokenizer's folder for the name of
#: a repository.
NOT_INHERITED = ("PYTHONPATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


class Aiperf:
    """An installed aiperf.

    Args:
        folder: Keeps the environment between sessions.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = (
            folder / f"aiperf-{VERSION}-python{sys.version_info[0]}.{sys.version_info[1]}"
        )
        self._binaries = self._folder / "bin"

    def install(self) -> None:
        """Makes the environment with pip as it is configured here, unless an earlier session has.

        Raises:
            CommandFailedError: It cannot be installed here.
        """
        complete = self._folder / "complete"  # what an aborted session leaves is made anew
        if complete.exists():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder.with_suffix(".log")
        venv = [sys.executable, "-m", "venv", "--clear", str(self._folder)]
        run_command(venv, log, timeout_s=ENVIRONMENT_TIMEOUT_S, environment=_environment())
        pip = [str(self._binaries / "python"), "-m", "pip", "install", "--quiet"]
        pip.append(f"aiperf=={VERSION}")
        run_command(pip, log, timeout_s=INSTALL_TIMEOUT_S, environment=_environment())
        complete.touch()

    def profile(self, artifacts: Path, options: Sequence[str], proxy: str) -> dict[str, Any]:
        """Runs ``aiperf profile`` and reads the results that it exports.

        Args:
            artifacts: What it writes.
            options: Of the command.
            proxy: URL of the proxy for all that is not on this machine.

        Raises:
            CommandFailedError: It failed or took too long.
        """
        artifacts.mkdir(parents=True)
        command = [str(self._binaries / "aiperf"), "profile", "--ui", "none", *options]
        environment = _environment() | {
            "HF_HOME": str(artifacts / "hub"),
            **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), proxy),
            **dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost"),
        }
        run_command(
            [*command, "--artifact-dir", str(artifacts)],
            artifacts.with_suffix(".log"),
            timeout_s=RUN_TIMEOUT_S,
            environment=environment,
        )
        exported = (artifacts / "profile_export_aiperf.json").read_text(encoding="utf-8")
        results: dict[str, Any] = json.loads(exported)
        return results


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
