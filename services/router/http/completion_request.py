"""A completion request (raw text or tokens), read from JSON."""

from dataclasses import dataclass
from typing import Any

from epd.errors import InvalidRequestError, UnsupportedFeatureError
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
    prompts: tuple[TextPrompt | TokenPrompt, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    logprobs: bool
    choice_count: int
    echo: bool
    stream: StreamOptions | None


def read_completion_request(body: Any, max_prompts: int, max_choices: int) -> CompletionRequest:
    """The checked request.

    Args:
        body: Decoded JSON.
        max_prompts: Most prompts of one request.
        max_choices: Most answers to one prompt.

    Raises:
        InvalidRequestError: a field has no valid value.
        UnsupportedFeatureError: a field, or a value of one, that is not supported.
    """
    fields = Fields(body)
    limit = fields.integer("max_tokens")
    logprobs = fields.integer("logprobs")
    request = CompletionRequest(
        model=fields.required_text("model"),
        prompts=_prompts(fields.take("prompt"), max_prompts),
        sampling=read_sampling(
            fields,
            max_tokens=DEFAULT_MAX_TOKENS if limit is None else limit,
            top_logprobs=logprobs or 0,
        ),
        stop=read_stop(fields),
        logprobs=logprobs is not None,
        choice_count=read_choice_count(fields, max_choices),
        echo=fields.flag("echo"),
        stream=read_stream_options(fields),
    )
    fields.only("best_of", request.choice_count)
    fields.finish()
    if request.echo and request.logprobs:
        # Prefill computes no probabilities of the prompt's own tokens.
        raise UnsupportedFeatureError(
            "echo is not supported together with logprobs",
            reason="UNSUPPORTED_VALUE",
            metadata={"field": "echo"},
        )
    return request


def _prompts(value: Any, most: int) -> tuple[TextPrompt | TokenPrompt, ...]:
    """A text or a list of tokens, or a list of such."""
    several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts = value if several else [value]
    if len(prompts) > most:
        raise InvalidRequestError(
            f"{len(prompts)} prompts, at most {most} are allowed", field="prompt"
        )
    return tuple(map(_prompt, prompts))


def _prompt(value: Any) -> TextPrompt | TokenPrompt:
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, list) and all(_is_token(token) for token in value):
        return TokenPrompt(tuple(value))
    raise InvalidRequestError(
        "expected a text or an array of token ids, or an array of such", field="prompt"
    )


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32
