"""Log probabilities in the two shapes that OpenAI's endpoints have."""

from collections.abc import Iterator
from typing import Any

from epd.sampling import TopLogprobs
from epd.text.token_bytes import TokenBytes
from services.router.calls import Delta


def chat_logprobs(delta: Delta, token_bytes: TokenBytes) -> dict[str, Any]:
    """Of a chat completion: each token with its bytes and the likeliest ones at its place."""
    return {
        "content": [
            {
                **_entry(token_id, logprob, token_bytes),
                "top_logprobs": [
                    _entry(other, value, token_bytes)
                    for other, value in zip(*(top or ((), ())), strict=True)
                ],
            }
            for token_id, logprob, top in _per_token(delta)
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """Of a completion: parallel lists; offsets count characters from the answer's beginning."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._offset = 0

    def of(self, delta: Delta) -> dict[str, Any]:
        """The next tokens of the answer."""
        found: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, logprob, top in _per_token(delta):
            text = _text(self._token_bytes.of(token_id))
            found["tokens"].append(text)
            found["token_logprobs"].append(logprob)
            found["text_offset"].append(self._offset)
            found["top_logprobs"].append(
                None
                if top is None
                else {
                    _text(self._token_bytes.of(other)): value
                    for other, value in zip(*top, strict=True)
                }
            )
            self._offset += len(text)
        return found


def _per_token(delta: Delta) -> Iterator[tuple[int, float, TopLogprobs | None]]:
    tops: list[TopLogprobs | None] = [*delta.top_logprobs] or [None] * len(delta.token_ids)
    yield from zip(delta.token_ids, delta.logprobs, tops, strict=True)


def _entry(token_id: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    data = token_bytes.of(token_id)
    return {"token": _text(data), "logprob": logprob, "bytes": list(data)}


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
