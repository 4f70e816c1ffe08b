"""Several answers to one request, to one prompt or to several, as one stream of events."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from epd.cleanup import cancel_and_wait
from services.router.calls import Completion, Delta, GenerateCall, PromptInput
from services.router.deadline import Deadline
from services.router.router import Router

_Event = tuple[int, Delta | Completion]


def choices_of(
    call: GenerateCall, prompts: Sequence[PromptInput], count: int
) -> list[GenerateCall]:
    """Calls that differ from this one by prompt and by the choice they draw: ``count`` a prompt."""
    return [
        dataclasses.replace(
            call,
            request_id=f"{call.request_id}-{index}" if index else call.request_id,
            prompt=prompts[index // count],
            sampling=dataclasses.replace(call.sampling, choice=index % count),
        )
        for index in range(len(prompts) * count)
    ]


async def generate_choices(
    router: Router, calls: Sequence[GenerateCall], deadline: Deadline
) -> AsyncGenerator[_Event, None]:
    """Events of all calls, each with its call's index. Closing the iterator cancels all.

    A prompt's calls after its first start once that has its first token: by then a prefill worker
    holds the prompt in its prefix cache, where they find it, so that it is computed once.

    Raises:
        EpdError: the first failure; it ends the other calls too.
    """
    if len(calls) == 1:
        async with aclosing(router.generate(calls[0], deadline)) as only:
            async for event in only:
                yield 0, event
        return
    # Once for all choices of a prompt, so that all are of the same images.
    fetched = {
        index: (await router.with_images(call, deadline)).prompt
        for index, call in enumerate(calls)
        if not call.sampling.choice
    }
    calls = [
        dataclasses.replace(call, prompt=fetched[index - call.sampling.choice])
        for index, call in enumerate(calls)
    ]
    # Small: a slow reader holds up the calls, whose own buffers then fill.
    events: asyncio.Queue[_Event | Exception] = asyncio.Queue(len(calls))
    #: By the index of a prompt's first call.
    prompt_cached = {
        index: asyncio.Event() for index, call in enumerate(calls) if not call.sampling.choice
    }

    async def run(index: int, call: GenerateCall) -> None:
        try:
            cached = prompt_cached[index - call.sampling.choice]
            if call.sampling.choice:
                await cached.wait()
            async with aclosing(router.generate(call, deadline)) as found:
                async for event in found:
                    cached.set()
                    await events.put((index, event))
        except Exception as error:
            await events.put(error)

    tasks = [asyncio.create_task(run(index, call)) for index, call in enumerate(calls)]
    unfinished = len(calls)
    try:
        while unfinished:
            next_ = await events.get()
            if isinstance(next_, Exception):
                raise next_
            unfinished -= isinstance(next_[1], Completion)
            yield next_
    finally:
        await cancel_and_wait(*tasks)
