"""A connection between two agents for small messages, beside the data."""

import contextlib
import errno
import socket
import struct

from epd.errors import TransferFailedError

#: Length of the body, kind of the frame.
_HEAD = struct.Struct("<IB")
MAX_FRAME_BYTES = 8 << 20
#: More than this waiting to be sent means that the peer takes nothing in.
MAX_UNSENT_BYTES = 64 << 20
_READ_BYTES = 1 << 18
#: What a connection that is still being made answers.
_CONNECTING = (errno.ENOTCONN, errno.EINPROGRESS, errno.EALREADY)


class Wire:
    """Frames over one TCP connection; never blocks. Used by the agent thread only.

    Frames arrive whole and in order. Once ``closed`` says why the connection ended, nothing is sent
    or received any more.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        #: Why the connection has ended; None while it lives.
        self.closed: str | None = None
        self._unsent = bytearray()
        self._received = bytearray()

    def send(self, kind: int, body: bytes) -> None:
        """Queues a frame and sends what the connection takes now.

        Raises:
            TransferFailedError: the connection has ended, or the frame is too long.
        """
        if self.closed is not None:
            raise TransferFailedError(f"connection to the peer has ended: {self.closed}")
        if len(body) > MAX_FRAME_BYTES:
            raise TransferFailedError(f"a message of {len(body)} bytes, {MAX_FRAME_BYTES} allowed")
        self._unsent += _HEAD.pack(len(body), kind) + body
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.close(f"{len(self._unsent)} bytes were never taken in")
        self.flush()

    def flush(self) -> None:
        """Sends what the connection takes now."""
        while self._unsent and self.closed is None:
            try:
                sent = self.socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _CONNECTING:
                    self.close(str(error))
                return
            del self._unsent[:sent]

    def receive(self) -> list[tuple[int, bytes]]:
        """Whole frames that have arrived: (kind, body). What came before the end is still given."""
        while self.closed is None:
            try:
                data = self.socket.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno not in _CONNECTING:
                    self.close(str(error))
                break
            if not data:
                self.close("the peer has closed it")
            self._received += data
            if len(data) < _READ_BYTES:
                break
        return self._take_frames()

    def close(self, reason: str) -> None:
        """Ends the connection; the first reason stays. The owner closes the socket, which turns
        readable now.
        """
        if self.closed is None:
            self.closed = reason
            self._unsent.clear()
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def _take_frames(self) -> list[tuple[int, bytes]]:
        frames: list[tuple[int, bytes]] = []
        begin = 0
        while len(self._received) - begin >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self._received, begin)
            if length > MAX_FRAME_BYTES:
                self.close(f"the peer announced a message of {length} bytes")
                break
            end = begin + _HEAD.size + length
            if len(self._received) < end:
                break
            frames.append((kind, bytes(self._received[begin + _HEAD.size : end])))
            begin = end
        del self._received[:begin]
        return frames
