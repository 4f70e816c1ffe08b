"""``python -m services.prefill``: computes the KV of prompts and pushes it to decode workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from epd.cleanup import CleanupTasks
from epd.engine.async_engine import AsyncEngine
from epd.handover.embedding_memory import EmbeddingMemory
from epd.handover.embedding_reader import EmbeddingReader
from epd.handover.seal import SealSlots
from epd.handover.sender import KvSender
from epd.handover.sender_config import PushTime, SenderConfig
from epd.rpc.channels import ChannelPool
from epd.rpc.client_interceptors import CallTracing
from epd.rpc.credentials import refuse_plain_text_peers
from epd.rpc.discovery import Discovery
from epd.rpc.roles import DECODE, ENCODER
from epd.rpc.service import Service, ServiceContext
from epd.rpc.worker_service import WorkerServicer
from epd.telemetry.metrics import observe, observe_carriers
from epd.transfer.buffer import HostBuffer
from epd.v1 import decode_pb2_grpc, encoder_pb2_grpc, prefill_pb2_grpc, worker_pb2_grpc
from epd.wire.reservation import RESERVE_METHOD
from epd.worker.held_parameters import count_held_parameters
from epd.worker.language_engine import kv_memory, load_language_engine
from epd.worker.report import follow_kv_events
from epd.worker.transfer_endpoint import open_endpoint
from epd.worker.upkeep import Upkeep
from services.prefill.admission import Admission
from services.prefill.computation import Computation
from services.prefill.config import PrefillConfig
from services.prefill.decode_peers import DecodePeers
from services.prefill.embeddings import Embeddings
from services.prefill.encoder_control import GrpcEncoderControl
from services.prefill.metrics import PrefillMetrics
from services.prefill.peer_link import PairingTerms, PeerLink
from services.prefill.pipeline import PrefillPipeline
from services.prefill.push_peers import PushPeers
from services.prefill.report import PrefillReport
from services.prefill.servicer import PrefillServicer

#: Encoders kept connected.
MAX_ENCODERS = 256


@asynccontextmanager
async def application(config: PrefillConfig, context: ServiceContext) -> AsyncIterator[None]:
    """Load, register, start the threads, pair, add the servicers; the reverse at the end."""
    language, pairing = config.language, config.pairing
    faults = config.fault.parsed()  # before anything slow
    if not config.tls.on:
        refuse_plain_text_peers(pairing.decodes, insecure=config.insecure)
    sender: KvSender
    loaded = await asyncio.to_thread(
        # The sender needs the engine's memory first; no layer is computed before it exists.
        load_language_engine,
        language,
        lambda layer, progress: sender.on_layer(layer, progress),
    )
    engine, layout = AsyncEngine(loaded), loaded.kv_cache.layout
    memory = EmbeddingMemory(config.embedding_bytes, language.max_running, config.embedding_wait_s)
    # Some wait for their last WRITE to end.
    slots = SealSlots(2 * language.max_running, layout.layer_count)
    scratch = HostBuffer(pairing.probe_bytes)
    transfer = language.transfer
    options = await asyncio.to_thread(transfer.options, context.server.address)
    agent = await asyncio.to_thread(
        open_endpoint,
        transfer.transport,
        context.role,
        context.instance_id,
        [
            *kv_memory(loaded),
            *((one, "DRAM") for one in (memory.segment, slots.segment, scratch.segment)),
        ],
        faults,
        options,
    )
    descriptors = await asyncio.to_thread(agent.descriptors)
    sender = KvSender(
        agent,
        layout,
        slots,
        _sender_config(config),
        loaded.kv_cache.read_block,
        host_kv=loaded.kv_cache.tensor.is_cpu,
    )
    channels = ChannelPool(context.telemetry, tls=context.peer_tls(DECODE))
    # Encoders are met in requests only, so nobody says when one is gone for good.
    encoder_channels = ChannelPool(
        context.telemetry, max_peers=MAX_ENCODERS, forgets=True, tls=context.peer_tls(ENCODER)
    )
    cleanup = CleanupTasks()
    metrics = PrefillMetrics(context.telemetry.meter)

    def encoder_control(address: str) -> GrpcEncoderControl:
        stub = encoder_pb2_grpc.EncoderServiceStub(encoder_channels.get(address))
        return GrpcEncoderControl(stub, pairing.control_timeout_s, config.encode_timeout_s)

    push_peers = PushPeers(
        agent, sender, scratch.segment, pairing.expect_rdma, pairing.pair_silence_s
    )
    terms = PairingTerms(descriptors, layout, pairing)

    def link(address: str) -> PeerLink:
        stub = decode_pb2_grpc.DecodeServiceStub(channels.get(address))
        calls = CallTracing(context.telemetry, address)
        traced = partial(calls.message, RESERVE_METHOD)
        return PeerLink(address, stub, terms, push_peers.join, push_peers.leave, traced)

    discovery = Discovery(pairing.decodes, period_s=pairing.discovery_period_s)
    peers = DecodePeers(discovery, link, pairing.pair_wait_s, channels.close)
    reader = EmbeddingReader(
        agent, memory, encoder_control, pairing.control_timeout_s, MAX_ENCODERS
    )
    embeddings = Embeddings(
        reader,
        encoder_control,
        pairing.control_timeout_s,
        cleanup,
        metrics.embeddings,
    )
    admission = Admission(language.max_running, language.max_waiting, config.queue_timeout_s)
    pipeline = PrefillPipeline(
        admission, peers, embeddings, Computation(engine, embeddings), sender, metrics
    )
    report = PrefillReport(
        config, context, descriptors, agent.carriers, loaded, admission, memory, sender
    )
    try:
        async with Upkeep(context.server) as upkeep:
            agent.on_death(upkeep.thread_death("the transfer agent"))
            loaded.on_fatal(upkeep.thread_death("the engine"))
            engine.start()
            upkeep.run("the KV sender", sender.run())
            upkeep.run("pairing", peers.run())
            observe(context.telemetry.meter, report.readings(count_held_parameters()))
            observe_carriers(context.telemetry.meter, agent.carriers)
            worker = WorkerServicer(
                report.info,
                report.load,
                heartbeat_s=config.heartbeat_s,
                kv_events=lambda: follow_kv_events(loaded.pool, context.instance_id),
            )
            handlers = context.server.handlers
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, handlers)
            servicer = PrefillServicer(pipeline, context.telemetry.tracer, descriptors)
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, handlers)
            yield
    finally:
        # Decode workers and encoders are told what is given up while they can be reached.
        await sender.close(pairing.control_timeout_s)
        await reader.close(pairing.control_timeout_s)
        await cleanup.drain(pairing.control_timeout_s)
        await engine.stop()
        await asyncio.to_thread(agent.stop)
        await channels.close_all()
        await encoder_channels.close_all()
        loaded.pool.check_integrity()  # broken accounts end with an exit status that shows
        memory.check_integrity()


def _sender_config(config: PrefillConfig) -> SenderConfig:
    return SenderConfig(
        reserve_timeout_s=config.pairing.reserve_timeout_s,
        control_timeout_s=config.pairing.control_timeout_s,
        lost_write_s=config.pairing.lost_write_s,
        push_time=PushTime(config.push),
    )


SERVICE = Service(
    role="prefill",
    config_class=PrefillConfig,
    service_names=("epd.v1.PrefillService", "epd.v1.WorkerService"),
    application=application,
)

if __name__ == "__main__":
    SERVICE.main()
