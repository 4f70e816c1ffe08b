"""``python -m services.decode``: takes the KV of prompts and draws the tokens after the first."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from epd.engine.async_engine import AsyncEngine
from epd.handover.lease_config import LeaseConfig
from epd.handover.receiver import KvReceiver
from epd.handover.receiver_config import ReceiverConfig
from epd.handover.seal import SealSlots
from epd.handover.verifier import KvVerifier
from epd.rpc.server_calls import ServerCalls
from epd.rpc.service import Service, ServiceContext
from epd.rpc.worker_service import WorkerServicer
from epd.telemetry.metrics import observe, observe_carriers
from epd.transfer.base import AgentDescriptor
from epd.v1 import decode_pb2_grpc, worker_pb2_grpc
from epd.worker.held_parameters import count_held_parameters
from epd.worker.language_engine import kv_memory, load_language_engine
from epd.worker.report import follow_kv_events
from epd.worker.transfer_endpoint import open_endpoint
from epd.worker.upkeep import Upkeep
from services.decode.config import DecodeConfig
from services.decode.local import LocalDecoding
from services.decode.local_images import LocalImages
from services.decode.local_start import local_encoder
from services.decode.pairing import Pairings, PairingTerms
from services.decode.remote import RemoteDecoding
from services.decode.report import DecodeReport
from services.decode.reserving import Reserving
from services.decode.servicer import DecodeServicer


@asynccontextmanager
async def application(config: DecodeConfig, context: ServiceContext) -> AsyncIterator[None]:
    """Load, register, start the threads, add the servicers; the reverse at the end."""
    loaded = await asyncio.to_thread(load_language_engine, config.language)
    engine, pool, layout = AsyncEngine(loaded), loaded.pool, loaded.kv_cache.layout
    checksum = config.receive.kv_checksum
    slots = SealSlots(config.receive.max_transfers, layout.layer_count if checksum else 0)
    transfer = config.language.transfer
    options = await asyncio.to_thread(transfer.options, context.server.address)
    agent = await asyncio.to_thread(
        open_endpoint,
        transfer.transport,
        context.role,
        context.instance_id,
        [*kv_memory(loaded), (slots.segment, "DRAM")],
        options=options,
    )
    descriptors = await asyncio.to_thread(agent.descriptors)
    receiver = KvReceiver(
        pool,
        layout,
        agent,
        slots,
        _receiver_config(config),
        headroom=lambda: loaded.stats().headroom_blocks,
        verifier=KvVerifier(loaded.kv_cache.read_block) if checksum else None,
    )

    async def join(peer: AgentDescriptor) -> None:
        await asyncio.wrap_future(agent.connect(peer))
        receiver.peer_arrived(peer)

    async def leave(peer: AgentDescriptor) -> None:
        receiver.peer_gone(peer.instance_id)
        await asyncio.wrap_future(agent.disconnect(peer.agent_name))

    receive = config.receive
    pairings = Pairings(
        PairingTerms(
            descriptors,
            layout,
            receive.pair_heartbeat_s,
            receive.pair_silence_s,
            receive.max_transfers,
        ),
        join,
        leave,
        Reserving(receiver, ServerCalls(context.telemetry, starts_traces=False)).answer,
    )
    remote = RemoteDecoding(
        engine,
        receiver,
        context.telemetry.tracer,
        kv_wait_s=receive.kv_wait_s,
        max_buffered_tokens=config.stream_buffer_tokens,
        early_start=receive.pipelined_start,
    )
    try:
        async with AsyncExitStack() as stack:
            upkeep = await stack.enter_async_context(Upkeep(context.server))
            agent.on_death(upkeep.thread_death("the transfer agent"))
            loaded.on_fatal(upkeep.thread_death("the engine"))
            engine.start()
            upkeep.run("the KV receiver", receiver.run())
            local, encoder = None, None
            if config.unified:
                died = upkeep.thread_death("the encoder")
                encoder = await stack.enter_async_context(local_encoder(config, loaded, died))
                local = LocalDecoding(
                    engine,
                    LocalImages(encoder),
                    context.telemetry.tracer,
                    max_buffered_tokens=config.stream_buffer_tokens,
                )
            report = DecodeReport(
                config, context, descriptors, agent.carriers, loaded, receiver, remote, encoder
            )
            observe(context.telemetry.meter, report.readings(count_held_parameters()))
            observe_carriers(context.telemetry.meter, agent.carriers)
            worker = WorkerServicer(
                report.info,
                report.load,
                heartbeat_s=config.heartbeat_s,
                kv_events=lambda: follow_kv_events(pool, context.instance_id),
            )
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, context.server.handlers)
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(
                DecodeServicer(pairings, receiver, remote, local), context.server.handlers
            )
            yield
    finally:
        await engine.stop()
        await asyncio.to_thread(agent.stop)
        receiver.leases.check_integrity()  # broken accounts end with an exit status that shows


def _receiver_config(config: DecodeConfig) -> ReceiverConfig:
    receive = config.receive
    return ReceiverConfig(
        leases=LeaseConfig(
            progress_timeout_s=receive.progress_timeout_s,
            hold_s=receive.quarantine_hold_s,
            peer_share=receive.peer_share,
        ),
        max_waiting=receive.max_reserve_waiting,
        reserve_timeout_s=receive.reserve_wait_s,
        early_start=receive.pipelined_start,
    )


SERVICE = Service(
    role="decode",
    config_class=DecodeConfig,
    service_names=("epd.v1.DecodeService", "epd.v1.WorkerService"),
    application=application,
)

if __name__ == "__main__":
    SERVICE.main()
