"""The content digest of an image: what the embedding cache and block hashes know it by."""

from blake3 import blake3

DIGEST_BYTES = 32


def image_digest(model_digest: str, processor_digest: str, data: bytes) -> bytes:
    """BLAKE3-256 over model, image-processor settings and file bytes, 32 bytes long.

    Every part is preceded by its length (8 bytes, little endian), so that no two different triples
    are the same byte sequence. Equal digests mean: the same embedding.

    Args:
        model_digest: Of configuration and weights, as ``GetInfo`` tells it.
        processor_digest: Of the image processor's settings, as ``GetInfo`` tells it.
        data: The image file as the client sent it.
    """
    digest = blake3()
    for part in (model_digest.encode(), processor_digest.encode(), data):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
