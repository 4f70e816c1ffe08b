"""Where an agent takes connections from its peers."""

import struct
from dataclasses import dataclass

from epd.errors import TransferFailedError

#: Port, length of the token; then the token, then the host in UTF-8 and no more.
_HEAD = struct.Struct("<HB")


@dataclass(frozen=True)
class WireAddress:
    """``token`` is random for each process start: who shows it has been given the descriptor."""

    host: str
    port: int
    token: bytes

    def encode(self) -> bytes:
        """The metadata of a descriptor."""
        return _HEAD.pack(self.port, len(self.token)) + self.token + self.host.encode()

    @classmethod
    def decode(cls, metadata: bytes) -> "WireAddress":
        """Reads metadata.

        Raises:
            TransferFailedError: it is not an address.
        """
        try:
            port, length = _HEAD.unpack_from(metadata)
            token = metadata[_HEAD.size :][:length]
            host = metadata[_HEAD.size + length :].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise TransferFailedError(f"connection data cannot be read: {error}") from error
        if len(token) != length or not host or not port:
            raise TransferFailedError("connection data names no address")
        return cls(host, port, token)
