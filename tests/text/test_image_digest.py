"""Two images are one to the cache only when model, settings and bytes are equal."""

from blake3 import blake3

from epd.image_digest import DIGEST_BYTES, image_digest


def test_each_part_counts_and_borders_between_parts_count() -> None:
    digests = {
        image_digest("ab", "c", b"d"),
        image_digest("a", "bc", b"d"),
        image_digest("ab", "", b"cd"),
        image_digest("ab", "c", b"e"),
    }
    assert len(digests) == 4


def test_the_digest_is_blake3_over_length_framed_parts() -> None:
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in (b"m", b"p", b"data"))
    digest = image_digest("m", "p", b"data")
    assert digest == blake3(framed).digest()
    assert len(digest) == DIGEST_BYTES
