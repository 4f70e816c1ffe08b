"""Chunks that leave running answers their pace."""

from epd.engine.chunk_limit import ChunkLimit


def measured(target_s: float) -> ChunkLimit:
    limit = ChunkLimit(target_s, least=16)
    for _ in range(50):
        limit.observe(decodes=4, prompt_tokens=0, seconds=0.010)
        limit.observe(decodes=4, prompt_tokens=200, seconds=0.010 + 200 * 0.0001)
    return limit


def test_a_step_with_a_chunk_stays_within_the_target() -> None:
    assert abs(measured(target_s=0.020).tokens(512) - 100) <= 3


def test_prompts_get_on_whatever_the_target() -> None:
    assert measured(target_s=0.005).tokens(512) == 16


def test_there_is_no_limit_without_a_target_or_a_measurement() -> None:
    assert measured(target_s=0.0).tokens(512) == 512
    assert ChunkLimit(0.02, least=16).tokens(512) == 512
    assert measured(target_s=60.0).tokens(512) == 512
