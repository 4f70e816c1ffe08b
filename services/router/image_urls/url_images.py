"""Puts downloaded images in the place of their URLs."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import TypeGuard

from epd.errors import UnsupportedFeatureError
from epd.rpc.status import root_error
from services.router.calls import Conversation, ImagePart, ImageUrlPart, PromptInput
from services.router.deadline import Deadline
from services.router.image_urls.downloads import Downloads
from services.router.limits import RequestLimits
from services.router.workers import ServedModel


def has_urls(prompt: PromptInput) -> TypeGuard[Conversation]:
    """Whether there is anything to download."""
    return isinstance(prompt, Conversation) and bool(prompt.image_urls)


class UrlImages:
    """Downloads a request's images, each URL once, before anything else is done with the request.

    Args:
        downloads: Does it; None where it is off.
        limits: What a request may contain.
    """

    def __init__(self, downloads: Downloads | None, limits: RequestLimits) -> None:
        self._downloads = downloads
        self._limits = limits

    async def fetched(
        self,
        prompt: PromptInput,
        model: ServedModel,
        deadline: Deadline,
        hold: Callable[[int], None],
    ) -> PromptInput:
        """The prompt with files in the place of URLs; the prompt itself where it has none.

        Args:
            prompt: What to answer.
            model: What the limits depend on.
            deadline: The request's.
            hold: Accounts for bytes as they come; may raise.

        Raises:
            UnsupportedFeatureError: URLs are off, or the model takes no images.
            InvalidRequestError: too many images, or one cannot be downloaded; names its field.
            DeadlineExceededError: the request's time is up.
        """
        if not has_urls(prompt):
            return prompt
        if self._downloads is None:
            raise UnsupportedFeatureError(
                "images are taken as data only, not by URL",
                reason="IMAGE_URLS_OFF",
                metadata={"field": prompt.image_urls[0].field},
            )
        self._limits.check_prompt(prompt, model)
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                files = await self._files(self._downloads, prompt, hold)
        except TimeoutError:
            raise deadline.error() from None
        return _replaced(prompt, files)

    async def _files(
        self, downloads: Downloads, prompt: Conversation, hold: Callable[[int], None]
    ) -> dict[str, bytes]:
        """The file of each URL; the first failure ends the other downloads."""
        fields = {part.url: part.field for part in reversed(prompt.image_urls)}
        try:
            async with asyncio.TaskGroup() as tasks:
                running = {
                    url: tasks.create_task(downloads.download(url, field, hold))
                    for url, field in fields.items()
                }
        except BaseExceptionGroup as group:
            raise root_error(group) from None
        return {url: task.result() for url, task in running.items()}


def _replaced(prompt: Conversation, files: dict[str, bytes]) -> Conversation:
    messages = [
        dataclasses.replace(
            message,
            parts=tuple(
                ImagePart(files[part.url]) if isinstance(part, ImageUrlPart) else part
                for part in message.parts
            ),
        )
        for message in prompt.messages
    ]
    return dataclasses.replace(prompt, messages=tuple(messages))
