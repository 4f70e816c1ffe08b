"""Prefix caches of both roles: the same is neither computed nor pushed; another image is other."""

import asyncio
import io
import random

import pytest
from PIL import Image

from epd.handover.seal import SEAL_BYTES
from epd.wire.kv_layout import layout_from_proto
from tests.e2e.test_bytes_moved import KV_BYTES, scrape_after, scrape_at_rest, worker_info
from tests.support.ask import ask, generate_request, greedy
from tests.support.reference import Question

pytestmark = pytest.mark.timeout(600)

TOKENS = 12
#: Common prefix of the questions below, several blocks of 32 tokens beyond the image.
TEXT = "where is the red circle and where is the blue square, and which of them is left of it? "


@pytest.fixture(scope="module")
def pictures():
    """Two pictures of equal size and different content."""
    source = random.Random(907)
    files = []
    for _ in range(2):
        file = io.BytesIO()
        small = Image.frombytes("RGB", (4, 4), source.randbytes(48))
        small.resize((280, 224), Image.Resampling.NEAREST).save(file, "PNG")
        files.append(file.getvalue())
    return files


async def test_equal_prefixes_are_found_on_both_sides_and_another_image_never_is(
    model, reference, shared_fleets, open_channel, pictures
):
    fleet = shared_fleets.get(model)
    channel = open_channel(fleet.router_address)
    idle = fleet.idle_level()
    info = await worker_info(open_channel(fleet.process("decode-0").address))
    layout = layout_from_proto(info.kv_layout)
    block_bytes = layout.block_bytes * layout.layer_count

    async def asked(question):
        """Usage, blocks of the prompt, and blocks that were pushed."""
        before = await scrape_at_rest(fleet, "prefill-0")
        answer = await ask(channel, generate_request(question, greedy(TOKENS)))
        assert answer.token_ids == reference.greedy(question, TOKENS)
        usage = answer.completion.usage
        assert 0 <= usage.cached_tokens <= usage.prompt_tokens
        after = await scrape_after(fleet, "prefill-0", before, 1)
        moved = after.total(KV_BYTES) - before.total(KV_BYTES) - SEAL_BYTES
        assert moved % block_bytes == 0
        return usage, layout.blocks_for(usage.prompt_tokens), moved // block_bytes

    first, other = pictures
    usage, blocks, pushed = await asked(Question((first,), TEXT))
    assert (usage.cached_tokens, pushed) == (0, blocks)

    usage, blocks, pushed = await asked(Question((other,), TEXT))
    assert (usage.cached_tokens, pushed) == (0, blocks), "the same text with another image"

    usage, blocks, pushed = await asked(Question((first,), TEXT))
    full = usage.prompt_tokens // layout.block_size
    computed_at_least = (usage.prompt_tokens - 1) // layout.block_size
    assert usage.cached_tokens == computed_at_least * layout.block_size
    assert pushed == blocks - full

    usage, blocks, pushed = await asked(Question((first,), TEXT + "answer in short words please."))
    # The end of the shorter prompt is the template's and differs from the longer one's text.
    assert 0 < usage.cached_tokens < usage.prompt_tokens
    assert usage.cached_tokens > usage.image_tokens, "the image's own blocks are found"
    assert pushed == blocks - usage.cached_tokens // layout.block_size
    await asyncio.to_thread(fleet.assert_back_to_idle, idle, settled_within_s=15.0)


async def test_many_equal_prompts_at_once_share_what_is_there_and_answer_the_same(
    model, reference, shared_fleets, open_channel, pictures
):
    """Reserve and Decode meet in any order; every request finds what earlier ones have left."""
    fleet = shared_fleets.get(model)
    channel = open_channel(fleet.router_address)
    idle = fleet.idle_level()
    questions = [
        Question((picture,), f"{TEXT} {TEXT} number {number}")
        for number in range(6)
        for picture in pictures
    ]
    for _ in range(2):
        answers = await asyncio.gather(
            *(ask(channel, generate_request(question, greedy(TOKENS))) for question in questions)
        )
        for question, answer in zip(questions, answers, strict=True):
            assert answer.token_ids == reference.greedy(question, TOKENS)
            usage = answer.completion.usage
            assert 0 <= usage.cached_tokens < usage.prompt_tokens
    assert all(answer.completion.usage.cached_tokens > 100 for answer in answers)
    await asyncio.to_thread(fleet.assert_back_to_idle, idle, settled_within_s=15.0)
