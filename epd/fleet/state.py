"""What one command leaves for the next: traces, logs and the router's address."""

import os
from collections.abc import Mapping
from pathlib import Path

from epd.telemetry.trace_folder import TraceFolder

DEFAULT_ROUTER = "127.0.0.1:50050"
ROUTER_VARIABLE = "EPD_ROUTER"
STATE_VARIABLE = "EPD_STATE"


class StateFolder:
    """A folder per user: ``EPD_STATE``, else ``epd`` in the XDG state folder.

    Args:
        environ: Environment of the command.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        base = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        self.path = Path(environ.get(STATE_VARIABLE) or Path(base) / "epd")
        self._environ = environ

    @property
    def traces(self) -> TraceFolder:
        """Traces of the latest fleets."""
        return TraceFolder(self.path / "traces")

    @property
    def logs(self) -> Path:
        """Output of the latest fleet's processes."""
        return self.path / "logs"

    def remember_router(self, address: str) -> None:
        """Notes where the running fleet's router is."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._router_file.write_text(address, encoding="utf-8")

    def forget_router(self) -> None:
        """The fleet has stopped."""
        self._router_file.unlink(missing_ok=True)

    def router_address(self, given: str = "") -> str:
        """``given`` by flag, else EPD_ROUTER, else the running fleet's, else the default."""
        if given or self._environ.get(ROUTER_VARIABLE):
            return given or self._environ[ROUTER_VARIABLE]
        try:
            return self._router_file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return DEFAULT_ROUTER

    @property
    def _router_file(self) -> Path:
        return self.path / "router"
