"""The child's side of :class:`bench.line_process.LineProcess`."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Command = Callable[..., Awaitable[Any]]


async def serve_lines(commands: Mapping[str, Command]) -> None:
    """Runs one command a line from stdin, one at a time, until it ends; answers on stdout."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        arguments = json.loads(line)
        answer = await commands[arguments.pop("name")](**arguments)
        print(json.dumps(answer), flush=True)
