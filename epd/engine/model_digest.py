"""Identity of a model: what two workers compare before KV moves between them."""

import json
from pathlib import Path

from blake3 import blake3

CHUNK_BYTES = 8 << 20


def model_digest(folder: Path) -> str:
    """BLAKE3 over config.json and every weight file, hexadecimal.

    Names and lengths are framed in, the order is by name; a worker that loads only half of the
    weights still reads all of the files, so the digest is the same on all workers. Streams: at most
    a few MiB are held. Seconds for a large model, so not for an event loop.
    """
    hasher = blake3()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        hasher.update(json.dumps([path.name, path.stat().st_size]).encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                hasher.update(chunk)
    return hasher.hexdigest()
