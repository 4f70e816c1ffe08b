"""A completion request (raw text or tokens), read from JSON."""

from dataclasses import dataclass
from typing import Any

from epd.errors import InvalidRequestError
from epd.sampling import SamplingParams
from services.router.calls import TextPrompt, TokenPrompt
from services.router.http.fields import Fields
from services.router.http.sampling_fields import read_choice_count, read_sampling, read_stop
from services.router.http.stream_options import StreamOptions, read_stream_options

#: OpenAI's own for this endpoint.
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class CompletionRequest:
    """What a client asks for; ``stream`` is None for one answer in one piece."""

    model: str
    prompt: TextPrompt | TokenPrompt
    sampling: SamplingParams
    stop: tuple[str, ...]
    logprobs: bool
    choice_count: int
    stream: StreamOptions | None


def read_completion_request(body: Any, max_choices: int) -> CompletionRequest:
    """The checked request.

    Args:
        body: Decoded JSON.
        max_choices: Most answers to one request.

    Raises:
        InvalidRequestError: a field has no valid value.
        UnsupportedFeatureError: a field, or a value of one, that is not supported.
    """
    fields = Fields(body)
    limit = fields.integer("max_tokens")
    logprobs = fields.integer("logprobs")
    request = CompletionRequest(
        model=fields.required_text("model"),
        prompt=_prompt(fields.take("prompt")),
        sampling=read_sampling(
            fields,
            max_tokens=DEFAULT_MAX_TOKENS if limit is None else limit,
            top_logprobs=logprobs or 0,
        ),
        stop=read_stop(fields),
        logprobs=logprobs is not None,
        choice_count=read_choice_count(fields, max_choices),
        stream=read_stream_options(fields),
    )
    fields.only("best_of", request.choice_count)
    fields.only("echo", False)
    fields.finish()
    return request


def _prompt(value: Any) -> TextPrompt | TokenPrompt:
    """One text or one list of tokens, alone or as the only item of a list."""
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        value = value[0]
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, list) and all(_is_token(token) for token in value):
        return TokenPrompt(tuple(value))
    raise InvalidRequestError(
        "expected one text or one array of token ids; send several prompts as several requests",
        field="prompt",
    )


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32
