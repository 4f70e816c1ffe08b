"""An answer streams through: tokens, text, usage, timings."""

from pathlib import Path

from tests.router.conftest import Fleet
from tests.router.fake_workers import PLACEHOLDERS, answer_token
from tests.router.harness import request, router, running
from tests.router.model_folder import END, IMAGE, START, token_ids
from tests.support.answer import collect


async def test_a_text_request_streams_all_tokens_in_order(model: Path, fleet: Fleet) -> None:
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request(seed=4, max_tokens=12)))
    assert answer.token_ids == [answer_token(4, position) for position in range(12)]
    assert answer.text == "quick brown "
    assert answer.completion.attempt_count == 1
    prompt = fleet.prefill.requests[0]
    expected = [START, *token_ids("user:hello"), END, START, *token_ids("assistant:")]
    assert list(prompt.token_ids) == expected
    assert answer.completion.usage.prompt_tokens == len(expected)
    assert answer.completion.usage.completion_tokens == 12
    assert answer.completion.usage.cached_tokens == 3
    assert answer.completion.usage.image_tokens == 0


async def test_images_take_the_place_of_their_anchors(model: Path, fleet: Fleet) -> None:
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request("what?", [b"one", b"two"])))
    prefill, decode = fleet.prefill.requests[0], fleet.decode.requests[0]
    prefix = [START, *token_ids("user:")]
    assert list(prefill.token_ids[: len(prefix) + 10]) == [*prefix, *PLACEHOLDERS, *PLACEHOLDERS]
    assert [(image.offset, image.length) for image in prefill.images] == [
        (len(prefix), 5),
        (len(prefix) + 5, 5),
    ]
    assert prefill.position_delta == decode.position_delta == -6
    assert decode.token_ids == prefill.token_ids
    assert decode.transfer_id == prefill.transfer_id
    assert [image.digest for image in decode.images] == [i.digest for i in prefill.images]
    assert all(image.handle.encoder_address == fleet.encoder.address for image in prefill.images)
    assert prefill.decode.address == fleet.decode.address
    assert prefill.decode.instance_id == fleet.decode.instance_id
    assert answer.completion.usage.image_tokens == 10
    assert not fleet.encoder.held
    assert IMAGE in prefill.token_ids
