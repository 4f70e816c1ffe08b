"""The answer of one request on its way to the client: tokens in, deltas out."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from epd.sampling import TopLogprobs
from epd.text.detokenizer import IncrementalDetokenizer
from epd.text.stop_strings import StopStringScanner
from services.router.calls import Completion, Delta


class OutputStream:
    """A bounded buffer that turns tokens into text.

    The reader gets everything that has come since it last looked as one delta: a fast reader sees
    each token at once, a slow one gets fewer and larger deltas. When the buffer is full the writer
    waits, so an idle reader costs this much memory and holds up nobody else.

    One writer, one reader.

    Args:
        detokenizer: Fresh.
        scanner: Fresh, with the request's stop strings.
        silent_ids: Tokens whose text is not part of the answer: the client's stop tokens.
        capacity: Most tokens in the buffer.
        coalesce_s: Least time between two deltas; tokens that come in between share one. The first
            delta waits for nothing.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        scanner: StopStringScanner,
        silent_ids: frozenset[int],
        capacity: int,
        coalesce_s: float = 0.0,
    ) -> None:
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._silent_ids = silent_ids
        self._capacity = capacity
        self._coalesce_s = coalesce_s
        #: All tokens of the answer so far, for replays.
        self.token_ids: list[int] = []
        self._pending_ids: list[int] = []
        self._pending_text: list[str] = []
        self._pending_logprobs: list[float] = []
        self._pending_tops: list[TopLogprobs] = []
        self._stopped = False
        self._end: Completion | BaseException | None = None
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    async def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[TopLogprobs] = (),
    ) -> bool:
        """Takes new tokens; True when a stop string has ended the answer.

        Tokens after the one that completes a stop string are not part of the answer, in this call
        or a later one: decode's first may be here already when prefill's token is found to stop.
        """
        for position, token_id in enumerate(token_ids):
            if self._stopped:
                return True
            if not self._writable.is_set():
                await self._writable.wait()
            self.token_ids.append(token_id)
            text = "" if token_id in self._silent_ids else self._detokenizer.push(token_id)
            scan = self._scanner.push(text)
            self._pending_ids.append(token_id)
            if position < len(logprobs):
                self._pending_logprobs.append(logprobs[position])
            if position < len(tops):
                self._pending_tops.append(tops[position])
            self._append(scan.text)
            self._stopped = scan.stopped
        return self._stopped

    def flush(self) -> bool:
        """Gives out held text at the end; True when a stop string is complete after all."""
        if self._stopped:
            return True
        scan = self._scanner.push(self._detokenizer.flush())
        self._append(scan.text if scan.stopped else scan.text + self._scanner.flush())
        return scan.stopped

    def complete(self, completion: Completion) -> None:
        """Ends the answer well."""
        self._end = completion
        self._readable.set()

    def fail(self, error: BaseException) -> None:
        """Ends the answer with an error, which the reader gets after all tokens."""
        self._end = error
        self._readable.set()

    async def deltas(self) -> AsyncIterator[Delta | Completion]:
        """The deltas, then the completion.

        Raises:
            EpdError: what :meth:`fail` was given.
        """
        next_s = 0.0
        loop = asyncio.get_running_loop()
        while True:
            await self._readable.wait()
            early_s = next_s - loop.time()
            if early_s > 0 and self._end is None:
                await asyncio.sleep(early_s)
            self._readable.clear()
            delta = self._take()
            self._writable.set()
            if delta.token_ids or delta.text:
                next_s = loop.time() + self._coalesce_s
                yield delta
            if self._end is not None and not self._readable.is_set():
                if isinstance(self._end, Completion):
                    yield self._end
                    return
                raise self._end

    def _append(self, text: str) -> None:
        self._pending_text.append(text)
        if len(self._pending_ids) >= self._capacity:
            self._writable.clear()
        self._readable.set()

    def _take(self) -> Delta:
        delta = Delta(
            self._pending_ids,
            "".join(self._pending_text),
            self._pending_logprobs,
            self._pending_tops,
        )
        self._pending_ids, self._pending_text = [], []
        self._pending_logprobs, self._pending_tops = [], []
        return delta
