"""Periodic control calls that wait for no other worker's answer."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class CallPerTarget:
    """Runs calls in a task group, at most one to each target at a time. Owned by the event loop."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._under_way: set[str] = set()

    def start(self, instance_id: str, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Makes the call, unless the target has not answered the one before; it is due again."""
        if instance_id in self._under_way:
            return
        self._under_way.add(instance_id)
        task = self._group.create_task(call())
        task.add_done_callback(lambda _: self._under_way.discard(instance_id))
