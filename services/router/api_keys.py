"""Who a caller is, by the key it shows."""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from epd.config import ConfigError
from epd.errors import UnauthenticatedError

#: Name of every caller where no keys are set.
ANONYMOUS = ""
_METADATA_KEYS = ("authorization", "x-api-key")


class ApiKeys:
    """Accepts the keys it was made with; with none of them it accepts everyone.

    Only digests are kept, and every digest is compared, in constant time: neither memory nor the
    time of an answer tells how much of a key was right.

    Args:
        keys: ``name:key`` or a bare key, which is its own client, numbered.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._clients: list[tuple[str, bytes]] = []
        for number, entry in enumerate(keys):
            name, colon, key = entry.strip().rpartition(":")
            if not key:
                raise ConfigError(f"API key {number} is empty")
            self._clients.append((name if colon else f"key-{number}", _digest(key)))

    @classmethod
    def load(cls, keys: Iterable[str], file: Path | None) -> "ApiKeys":
        """Keys of a setting and of a file, one a line; ``#`` begins a comment line.

        Raises:
            ConfigError: the file cannot be read, or a key is empty.
        """
        lines: list[str] = []
        if file is not None:
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
            except OSError as error:
                raise ConfigError(f"API keys: {error.strerror}: {file}") from error
        stripped = (line.strip() for line in lines)
        return cls([*keys, *(line for line in stripped if line and not line.startswith("#"))])

    def client(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """Name of the caller, from ``authorization: Bearer KEY`` or ``x-api-key: KEY``.

        Raises:
            UnauthenticatedError: keys are set, and the caller shows none or a wrong one.
        """
        if not self._clients:
            return ANONYMOUS
        shown = {name: str(value) for name, value in metadata if name in _METADATA_KEYS}
        key = shown.get("x-api-key") or shown.get("authorization", "").removeprefix("Bearer ")
        digest = _digest(key)
        # No early end: which key matched must not show in the time.
        found = [name for name, known in self._clients if hmac.compare_digest(known, digest)]
        if not found:
            raise UnauthenticatedError("a valid API key is required")
        return found[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
