"""A process group of two: the only file that knows torch.distributed."""

import contextlib
import datetime
import os
from typing import Any

import torch
import torch.distributed

from epd.errors import TransferFailedError
from epd.transfer.lane import Lane, LaneCall

# Its classes are known at run time only, NCCL's in CUDA builds only.
_dist: Any = torch.distributed

#: No transfer has this tag.
_POISON_TAG = (1 << 31) - 1
_TAGS = _POISON_TAG


class PairGroup:
    """Sends to and receives from one peer: gloo for host memory, NCCL for device memory.

    Made directly from a store of its own, never through the process-wide default group: when the
    peer dies this group breaks and no other. The host of the group (rank 0) makes it without
    ``store`` and tells the guest its :attr:`port`. Making it waits for the peer, and gloo has no
    way to ask whether a transfer is through, so both happen on a lane.

    Args:
        peer: Name of the peer, for thread and messages.
        own_host: Numeric address of this process.
        store: Host and port of the peer's store; None makes the store here.
        device: Where the tensors are.
        timeout_s: Longest wait for the peer, in the making and in each send and receive.
    """

    def __init__(
        self,
        peer: str,
        own_host: str,
        store: tuple[str, int] | None,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.device = device
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._rank = 0 if store is None else 1
        self._own_host = own_host
        self._group: Any = None
        self._store: Any = None
        if store is None:
            try:
                self._store = self._make_store(own_host, 0)
            except Exception as error:
                raise TransferFailedError(f"no store for a group with {peer}: {error}") from error
        self._lane = Lane(f"pair {peer}")
        self._making = self._lane.call(lambda: self._make(store))

    @property
    def port(self) -> int:
        """Port of the store made here."""
        assert self._store is not None
        return int(self._store.port)

    @property
    def ready(self) -> bool:
        """Both are in the group."""
        return self._making.done and self._making.error is None

    @property
    def failure(self) -> str | None:
        """Why the group cannot be made."""
        return self._making.error if self._making.done else None

    def send(self, tensor: torch.Tensor, number: int) -> LaneCall:
        """Posts a send of a contiguous tensor, which the call keeps alive.

        Raises:
            TransferFailedError: the group is broken.
        """
        return self._post("send", tensor, number)

    def receive(self, tensor: torch.Tensor, number: int) -> LaneCall:
        """Posts a receive into a contiguous tensor; as :meth:`send`."""
        return self._post("recv", tensor, number)

    def close(self) -> None:
        """Breaks the group: what is posted fails, here at once and there when it hears of it."""
        if self.ready:
            with contextlib.suppress(Exception):  # that it fails is the purpose
                self._break()
        with contextlib.suppress(TransferFailedError):
            self._lane.call(self._drop)
        self._lane.close()

    def _make_store(self, host: str, port: int) -> Any:
        return _dist.TCPStore(
            host, port, None, self._rank == 0, self._timeout, wait_for_workers=False
        )

    def _make(self, where: tuple[str, int] | None) -> None:
        store = self._make_store(*where) if where else self._store
        if self.device.type == "cuda":
            # The watchdog would end this process when one peer is lost.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            options = _dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = _dist.ProcessGroupNCCL(store, self._rank, 2, options)
        else:
            gloo = _dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = self._timeout
            options._devices = [gloo.create_device(hostname=self._own_host)]
            options._threads = 1
            self._group = gloo(store, self._rank, 2, options)

    def _post(self, operation: str, tensor: torch.Tensor, number: int) -> LaneCall:
        try:
            work = getattr(self._group, operation)([tensor], 1 - self._rank, number % _TAGS)
        except RuntimeError as error:
            raise TransferFailedError(f"the pair's group is broken: {error}") from error

        def wait() -> None:
            work.wait()
            if tensor.device.type == "cuda":  # until here only the stream has waited
                torch.cuda.current_stream(tensor.device).synchronize()

        return self._lane.call(wait)

    def _break(self) -> None:
        if self.device.type == "cuda":
            self._group.abort()
            return
        # Gloo's abort reaches no posted send or receive; a wait that times out closes the pair.
        nothing = torch.empty(1, dtype=torch.uint8)
        work = self._group.recv([nothing], 1 - self._rank, _POISON_TAG)
        work.wait(datetime.timedelta(milliseconds=1))

    def _drop(self) -> None:
        """Its destructor joins threads, so it runs on the lane."""
        self._group = None
        self._store = None
