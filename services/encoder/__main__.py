"""``python -m services.encoder``: from flags to a serving encoder."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from epd.encoding.encoder import Encoder
from epd.rpc.options import IMAGE_MESSAGE_BYTES
from epd.rpc.service import Service, ServiceContext
from epd.rpc.worker_service import WorkerServicer
from epd.telemetry.metrics import observe, observe_carriers
from epd.v1 import encoder_pb2_grpc, worker_pb2_grpc
from epd.worker.held_parameters import count_held_parameters
from epd.worker.transfer_endpoint import open_endpoint
from epd.worker.upkeep import Upkeep
from services.encoder.config import EncoderConfig
from services.encoder.read_announcer import ReadAnnouncer
from services.encoder.report import encoder_info, encoder_load, encoder_readings
from services.encoder.servicer import EncoderServicer
from services.encoder.vision_parts import load_vision_parts
from services.encoder.wire import EncodeResponses


@asynccontextmanager
async def encoder_application(
    config: EncoderConfig, context: ServiceContext
) -> AsyncIterator[None]:
    """Weights → memory and workers → transfer endpoint → servicers; backwards at the end."""
    server, telemetry = context.server, context.telemetry
    async with AsyncExitStack() as stack:
        upkeep = await stack.enter_async_context(Upkeep(server))
        parts = await asyncio.to_thread(load_vision_parts, config)
        encoder = Encoder(
            parts.family,
            parts.runner,
            parts.model_digest,
            config.encoding,
            dtype=config.dtype,
            threads=config.threads,
            on_fatal=upkeep.thread_death("the encode batcher"),
        )
        # Last of all: broken accounts end with an exit status that shows.
        stack.callback(encoder.check_integrity)
        stack.push_async_callback(encoder.stop)
        await encoder.start()

        options = await asyncio.to_thread(config.transfer.options, server.address)
        agent = await asyncio.to_thread(
            open_endpoint,
            config.transfer.transport,
            "encoder",
            context.instance_id,
            [(encoder.memory, "DRAM")],
            options=options,
        )
        stack.push_async_callback(asyncio.to_thread, agent.stop)
        agent.on_death(upkeep.thread_death("the transfer agent"))
        server.stay_while(lambda: encoder.readable)
        encoder.watch(ReadAnnouncer(agent, lambda: encoder.readable).update)

        descriptors = await asyncio.to_thread(agent.descriptors)
        worker = WorkerServicer(
            lambda: encoder_info(
                config, parts, descriptors, agent.carriers(), telemetry.metrics_address
            ),
            lambda: encoder_load(encoder.stats(), context.instance_id, draining=server.draining),
            heartbeat_s=config.heartbeat_s,
        )
        encoder.watch(worker.load_changed)
        observe(telemetry.meter, encoder_readings(encoder.stats, count_held_parameters()))
        observe_carriers(telemetry.meter, agent.carriers)

        servicer = EncoderServicer(
            encoder, EncodeResponses(descriptors, server.address), telemetry.tracer
        )
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(servicer, server.handlers)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server.handlers)
        yield


SERVICE = Service(
    role="encoder",
    config_class=EncoderConfig,
    service_names=("epd.v1.EncoderService", "epd.v1.WorkerService"),
    application=encoder_application,
    message_bytes=IMAGE_MESSAGE_BYTES,
)

if __name__ == "__main__":
    SERVICE.main()
