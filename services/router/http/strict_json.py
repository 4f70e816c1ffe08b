"""JSON as clients write it, read so that nothing comes out that cannot be written again."""

import json
import re
from typing import Any

#: Half of a surrogate pair, spelled as an escape; a whole pair is one character.
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(data: str | bytes) -> Any:
    """The value that a JSON text stands for.

    Python takes lone surrogates, as escapes and as bytes; no tokenizer, message or answer does.

    Raises:
        ValueError: it is no JSON, nested too deeply, or has a lone surrogate in a string.
    """
    try:
        text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
        value = json.loads(text)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value
