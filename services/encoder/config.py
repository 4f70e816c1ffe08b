"""Settings of the encoder service."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from epd.config import option
from epd.encoding.encoding_config import EncodingConfig
from epd.rpc.server_config import ServerConfig
from epd.worker.transfer_config import TransferConfig


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ServerConfig):
    """Encoder worker: turns images into embeddings and keeps them for prefill workers to read."""

    model: Path = option(help="model folder as Hugging Face lays it out")
    model_name: str = option("", help="name shown to clients; empty takes the folder's name")
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "float32", help="element type of weights and embeddings"
    )
    device: str = option("cpu", help="torch device")
    threads: int = option(1, help="torch threads of the vision tower", minimum=1)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    encoding: EncodingConfig

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.model_name or self.model.resolve().name
