"""Whether and how an answer is streamed."""

from dataclasses import dataclass

from epd.errors import InvalidRequestError
from services.router.http.fields import Fields


@dataclass(frozen=True)
class StreamOptions:
    """``include_usage`` adds a last chunk with token counts."""

    include_usage: bool = False


def read_stream_options(fields: Fields) -> StreamOptions | None:
    """Takes ``stream`` and ``stream_options``; None when the answer shall come in one piece.

    Raises:
        InvalidRequestError: options without a stream.
    """
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is None:
        return StreamOptions() if stream else None
    if not stream:
        raise InvalidRequestError("allowed only with stream: true", field="stream_options")
    found = StreamOptions(include_usage=options.flag("include_usage"))
    # Padding of chunks against traffic analysis: off is the only thing that is offered.
    options.only("include_obfuscation", False)
    options.finish()
    return found
