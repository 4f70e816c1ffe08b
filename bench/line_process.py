"""A child process that is asked and answers in lines of JSON."""

import json
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any


class LineProcess:
    """``python -m MODULE ARGUMENTS``; stderr passes through. A context manager."""

    def __init__(self, module: str, *arguments: object, env: Mapping[str, str]) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(env),
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def __enter__(self) -> "LineProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def tell(self, name: str, **arguments: Any) -> None:
        """Sends a command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"name": name, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """The next answer.

        Raises:
            RuntimeError: the process has ended; it has said why on stderr.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} has ended")
        return json.loads(line)

    def ask(self, name: str, **arguments: Any) -> Any:
        """Sends a command and waits for its answer."""
        self.tell(name, **arguments)
        return self.answer()
