"""NIXL, with UCX underneath. The only file that knows the library."""

import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epd.errors import TransferFailedError, UnavailableError, UnknownMemoryError
from epd.transfer.base import (
    AgentDescriptor,
    Capabilities,
    Segment,
    TransferBackend,
    TransferHandle,
    TransferResult,
    TransferState,
)
from epd.transfer.pieces import check_pairs
from epd.transfer.segments import SegmentArray
from epd.transfer.ucx_log import ucx_log

log = logging.getLogger(__name__)

_STATES = {
    "DONE": TransferState.DONE,
    "PROC": TransferState.RUNNING,
    "ERR": TransferState.FAILED,
}


@dataclass(frozen=True)
class NixlOptions:
    """How NIXL is set up.

    ``backend`` is UCX or LIBFABRIC. ``error_mode`` is UCX's error handling: ``peer`` notices a dead
    peer, ``none`` is quicker to connect and does not. ``progress_thread`` lets NIXL spin on a core
    of its own: right for a GPU node, ruinous on a small machine; without it progress is made when
    the agent polls.
    """

    backend: str = "UCX"
    error_mode: str = "peer"
    progress_thread: bool = False


def _import_nixl() -> Any:
    for module in ("nixl", "nixl_cu12"):
        try:
            nixl = importlib.import_module(module)
        except ImportError:
            continue
        # The library logs every start to stdout, where our READY line goes. Ours to route instead.
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
        return nixl
    raise UnavailableError("transport nixl needs the package nixl or nixl-cu12")


class _NixlHandle(TransferHandle):
    def __init__(self, raw: Any, planned: Sequence[Segment]) -> None:
        self.raw = raw
        self.state = TransferState.RUNNING
        self.planned = planned
        self.posted_ns = time.perf_counter_ns()


class NixlBackend(TransferBackend):
    """One NIXL agent. Its name is new at every process start: NIXL does not notice duplicates."""

    name = "nixl"
    capabilities = Capabilities(one_sided=True, cancellable=False, survives_peer_loss=True)

    def __init__(self, agent_name: str, instance_id: str, options: NixlOptions) -> None:
        with ucx_log().captured():
            self._open(agent_name, options)
        self._libraries = [options.backend]
        self._agent_name = agent_name
        self._instance_id = instance_id
        self._registered: list[tuple[Segment, str, Any]] = []
        self._peers: dict[str, AgentDescriptor] = {}
        # Handles NIXL would not let go of yet after a post that failed.
        self._unreleased: list[_NixlHandle] = []

    def _open(self, agent_name: str, options: NixlOptions) -> None:
        nixl = _import_nixl()
        bindings = importlib.import_module(nixl.nixl_agent.__module__).nixlBind
        # Raised when descriptors are not within registered memory, before anything is sent.
        self._not_found: type[Exception] = bindings.nixlNotFoundError
        # NIXL's exceptions have no common base.
        self._errors: tuple[type[Exception], ...] = tuple(
            value
            for value in vars(bindings).values()
            if isinstance(value, type) and issubclass(value, Exception)
        )
        config = nixl.nixl_agent_config(
            enable_prog_thread=options.progress_thread,
            enable_listen_thread=False,
            capture_telemetry=True,
            backends=[],
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
        )
        self._agent = nixl.nixl_agent(agent_name, config)
        ucx = {"ucx_error_handling_mode": options.error_mode}
        try:
            self._agent.create_backend(options.backend, ucx if options.backend == "UCX" else {})
        except self._errors as error:
            raise UnavailableError(
                f"NIXL cannot start its backend {options.backend}: {error!r}"
            ) from error

    def register(self, segment: Segment, memory_kind: str) -> None:
        row = (segment.address, segment.length, segment.device_id, "")
        try:
            descriptors = self._agent.register_memory([row], memory_kind, backends=self._libraries)
        except self._errors as error:
            raise TransferFailedError(f"NIXL cannot register {segment}: {error!r}") from error
        assert descriptors is not None
        self._registered.append((segment, memory_kind, descriptors))

    def descriptor(self) -> AgentDescriptor:
        return AgentDescriptor(
            self._instance_id,
            self._agent_name,
            self.name,
            bytes(self._agent.get_agent_metadata()),
            "VRAM" if any(kind == "VRAM" for _, kind, _ in self._registered) else "DRAM",
        )

    def carriers(self) -> Mapping[str, Sequence[str]]:
        return {self.name: ucx_log().carriers if self._libraries == ["UCX"] else ()}

    def add_peer(self, peer: AgentDescriptor) -> None:
        if self._peers.get(peer.agent_name) == peer:
            return
        self.remove_peer(peer.agent_name)
        try:
            answer = self._agent.add_remote_agent(peer.metadata)
        except self._errors as error:
            raise TransferFailedError(f"NIXL refuses peer {peer.agent_name}: {error!r}") from error
        # NIXL answers bytes here and keys its notices by str: one form from here on.
        named = answer.decode() if isinstance(answer, bytes) else str(answer)
        if named != peer.agent_name:
            self._forget(named)
            raise TransferFailedError(f"metadata of {peer.agent_name} belongs to {named}")
        self._peers[named] = peer

    def remove_peer(self, agent_name: str) -> None:
        if self._peers.pop(agent_name, None) is not None:
            self._forget(agent_name)

    def write(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        return self._post("WRITE", agent_name, local, remote, notice)

    def read(
        self, agent_name: str, local: Sequence[Segment], remote: Sequence[Segment], notice: bytes
    ) -> TransferHandle:
        return self._post("READ", agent_name, local, remote, notice)

    def poll(self, handle: TransferHandle) -> TransferState:
        assert isinstance(handle, _NixlHandle)
        if handle.state is TransferState.RUNNING:
            try:
                handle.state = _STATES[self._agent.check_xfer_state(handle.raw)]
            except self._errors as error:
                log.warning("NIXL transfer failed: %r", error)
                handle.state = TransferState.FAILED
        return handle.state

    def finish(self, handle: TransferHandle) -> TransferResult:
        assert isinstance(handle, _NixlHandle)
        assert handle.state is TransferState.DONE
        try:
            told = self._agent.get_xfer_telemetry(handle.raw)
            result = TransferResult(
                int(told.totalBytes),
                int(told.descCount),
                int(told.postDuration) * 1000,
                int(told.xferDuration) * 1000,
            )
        except self._errors:  # vetoed by NIXL_TELEMETRY_ENABLE=n: what we asked for was done
            elapsed = time.perf_counter_ns() - handle.posted_ns
            moved = SegmentArray.of(handle.planned)
            result = TransferResult(moved.byte_count, len(moved), elapsed, elapsed)
        if not self.release(handle):
            self._unreleased.append(handle)
        return result

    def release(self, handle: TransferHandle) -> bool:
        assert isinstance(handle, _NixlHandle)
        try:
            self._agent.release_xfer_handle(handle.raw)
        except self._errors:
            return False
        return True

    def notices(self) -> list[tuple[str, bytes]]:
        if self._unreleased:
            self._unreleased = [one for one in self._unreleased if not self.release(one)]
        try:
            arrived = self._agent.get_new_notifs()
        except self._errors as error:
            # A peer that died mid-message must not end the others' transfers.
            log.warning("NIXL cannot fetch notices: %r", error)
            return []
        return [(str(name), bytes(notice)) for name, all_ in arrived.items() for notice in all_]

    def close(self) -> None:
        for name in list(self._peers):
            self.remove_peer(name)
        for _, _, descriptors in self._registered:
            try:
                self._agent.deregister_memory(descriptors, backends=self._libraries)
            except self._errors as error:
                log.warning("NIXL cannot deregister memory: %r", error)
        self._registered.clear()
        self._unreleased.clear()
        self._agent = None

    def _forget(self, agent_name: str) -> None:
        try:
            self._agent.remove_remote_agent(agent_name)
        except self._errors as error:
            log.debug("NIXL had no peer %s to remove: %r", agent_name, error)

    def _post(
        self,
        operation: str,
        agent_name: str,
        local: Sequence[Segment],
        remote: Sequence[Segment],
        notice: bytes,
    ) -> TransferHandle:
        check_pairs(local, remote)
        if agent_name not in self._peers:
            raise TransferFailedError(f"{operation}: peer {agent_name} is unknown")
        handle = None
        try:
            raw = self._prepare(operation, agent_name, local, remote, notice)
            handle = _NixlHandle(raw, local)
            handle.state = _STATES[self._agent.transfer(raw)]
        except self._errors as error:
            if handle is not None and not self.release(handle):
                self._unreleased.append(handle)
            unknown = handle is None and isinstance(error, self._not_found)
            raise (UnknownMemoryError if unknown else TransferFailedError)(
                f"{operation} to {agent_name} could not be posted: {type(error).__name__} {error}"
            ) from error
        return handle

    def _prepare(
        self,
        operation: str,
        agent_name: str,
        local: Sequence[Segment],
        remote: Sequence[Segment],
        notice: bytes,
    ) -> Any:
        """A transfer ready to be posted.

        A segment does not say its kind of memory. Ours is known from registration; a peer with
        device memory has host memory too, for seals, so both are tried there.
        """
        here = self._descriptors(local, self._kind_of(local[0]))
        kinds = dict.fromkeys((self._peers[agent_name].memory_kind, "DRAM"))
        refused: Exception | None = None
        for kind in kinds:
            try:
                return self._agent.initialize_xfer(
                    operation,
                    here,
                    self._descriptors(remote, kind),
                    agent_name,
                    notice,
                    backends=self._libraries,
                )
            except self._errors as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _kind_of(self, segment: Segment) -> str:
        for whole, kind, _ in self._registered:
            if whole.address <= segment.address < whole.address + whole.length:
                return kind
        return "DRAM"  # unregistered: NIXL refuses it

    def _descriptors(self, segments: Sequence[Segment], memory_kind: str) -> Any:
        rows = SegmentArray.of(segments).rows
        descriptors = self._agent.get_xfer_descs(rows, memory_kind)
        assert descriptors is not None  # NIXL logs and answers None for rows it cannot read
        return descriptors
