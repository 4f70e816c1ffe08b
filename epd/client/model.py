"""The served model and its workers, as a client sees them."""

from dataclasses import dataclass

from epd.v1 import router_pb2


@dataclass(frozen=True)
class Worker:
    """A worker as the router sees it; ``reason`` says why it is not healthy."""

    role: str
    address: str
    instance_id: str
    healthy: bool
    in_flight: int
    reason: str


@dataclass(frozen=True)
class Model:
    """The served model. All but ``workers`` is empty or 0 while the router has no worker."""

    name: str
    digest: str
    context_length: int
    accepts_images: bool
    max_images: int
    workers: tuple[Worker, ...]


def model_from_proto(response: router_pb2.GetModelResponse) -> Model:
    """The answer of GetModel."""
    return Model(
        name=response.model_name,
        digest=response.model_digest,
        context_length=response.context_length,
        accepts_images=response.accepts_images,
        max_images=response.max_images,
        workers=tuple(
            Worker(
                role=worker.role,
                address=worker.address,
                instance_id=worker.instance_id,
                healthy=worker.healthy,
                in_flight=worker.in_flight,
                reason=worker.reason,
            )
            for worker in response.workers
        ),
    )
