"""Tests of NIXL where UCX may use TCP alone, as between machines without RDMA."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"UCX_TLS": "tcp"}


def pass_over_tcp(file: str, expression: str, count: int) -> None:
    """So many tests of a file, named by a ``-k`` expression, pass in a process of its own: UCX
    reads its environment once.
    """
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"),
            *(file, "-k", expression),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=270,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert f"{count} passed" in ran.stdout, ran.stdout[-400:]
