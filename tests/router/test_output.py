"""Tokens become deltas: coalesced for slow readers, whole characters only, stop strings cut."""

import asyncio
from pathlib import Path

import pytest

from epd.sampling import FinishReason
from epd.text.detokenizer import IncrementalDetokenizer
from epd.text.stop_strings import StopStringScanner
from epd.text.tokenizer import Tokenizer
from epd.v1 import router_pb2
from services.router.calls import Completion, Delta, Usage
from services.router.output import OutputStream
from tests.router.conftest import Fleet
from tests.router.fake_workers import answer_token
from tests.router.harness import eventually, request, router, running
from tests.router.model_folder import token_ids
from tests.support.answer import collect

DONE = Completion(FinishReason.STOP, Usage(1, 1, 0, 0), {}, 0, "id", 1)


@pytest.fixture
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_folder(model)


def stream(
    tokenizer: Tokenizer, stop: tuple[str, ...] = (), capacity: int = 100, silent: int = -1
) -> OutputStream:
    return OutputStream(
        IncrementalDetokenizer(tokenizer), StopStringScanner(stop), frozenset({silent}), capacity
    )


async def read(output: OutputStream) -> list[Delta]:
    return [event async for event in output.deltas() if isinstance(event, Delta)]


async def test_a_reader_that_is_late_gets_everything_in_one_delta(tokenizer: Tokenizer) -> None:
    output = stream(tokenizer)
    for token in token_ids("abc"):
        await output.push([token], [-1.0])
    output.complete(DONE)
    assert await read(output) == [Delta(token_ids("abc"), "abc", [-1.0] * 3, [])]


async def test_a_reader_that_waits_gets_each_token_at_once(tokenizer: Tokenizer) -> None:
    output = stream(tokenizer)
    reading = asyncio.create_task(read(output))
    for token in token_ids("abc"):
        await asyncio.sleep(0)
        await output.push([token], [-1.0])
        await asyncio.sleep(0)
    output.complete(DONE)
    assert [delta.text for delta in await reading] == ["a", "b", "c"]


async def test_tokens_that_come_after_a_stop_string_in_a_later_call_are_no_part_of_the_answer(
    tokenizer: Tokenizer,
) -> None:
    output = stream(tokenizer, stop=("b",))
    assert await output.push(token_ids("ab"), [-1.0] * 2)
    assert await output.push(token_ids("cb"), [-1.0] * 2)  # the other leg's, on their way already
    assert output.flush()
    output.complete(DONE)
    assert await read(output) == [Delta(token_ids("ab"), "a", [-1.0] * 2, [])]
    assert output.token_ids == token_ids("ab")


async def test_a_full_buffer_holds_up_the_writer_until_it_is_read(tokenizer: Tokenizer) -> None:
    output = stream(tokenizer, capacity=4)
    writing = asyncio.create_task(output.push(token_ids("abcdefgh"), [0.0] * 8))
    await asyncio.sleep(0.02)
    assert not writing.done()
    deltas = output.deltas()
    assert (await anext(deltas)) == Delta(token_ids("abcd"), "abcd", [0.0] * 4, [])
    await asyncio.sleep(0)
    assert not await writing


async def test_characters_leave_whole(tokenizer: Tokenizer) -> None:
    output = stream(tokenizer)
    texts = []
    deltas = output.deltas()
    for token in token_ids("é🦊"):
        await output.push([token], [])
        texts.append((await anext(deltas)).text)  # type: ignore[union-attr]
    assert texts == ["", "é", "", "", "", "🦊"]


async def test_tokens_after_a_stop_string_are_not_part_of_the_answer(tokenizer: Tokenizer) -> None:
    output = stream(tokenizer, stop=("cd",))
    assert await output.push(token_ids("abcdef"), [0.0] * 6)
    output.complete(DONE)
    (delta,) = await read(output)
    assert delta.text == "ab"
    assert delta.token_ids == output.token_ids == token_ids("abcd")


async def test_held_text_comes_at_the_end(tokenizer: Tokenizer) -> None:
    output = stream(tokenizer, stop=("b!",))
    assert not await output.push(token_ids("ab"), [0.0] * 2)
    assert not output.flush()
    output.complete(DONE)
    assert "".join(delta.text for delta in await read(output)) == "ab"


async def test_a_stop_token_has_no_text(tokenizer: Tokenizer) -> None:
    (dot,) = token_ids(".")
    output = stream(tokenizer, silent=dot)
    await output.push(token_ids("ab."), [0.0] * 3)
    output.complete(DONE)
    (delta,) = await read(output)
    assert (delta.text, delta.token_ids[-1]) == ("ab", dot)


async def test_an_error_comes_after_all_tokens(tokenizer: Tokenizer) -> None:
    output = stream(tokenizer)
    await output.push(token_ids("ab"), [0.0] * 2)
    output.fail(RuntimeError("late"))
    deltas = output.deltas()
    assert (await anext(deltas)).text == "ab"  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="late"):
        await anext(deltas)


async def test_a_stop_string_ends_the_request_early_and_cancels_decode(
    model: Path, fleet: Fleet
) -> None:
    fleet.decode.token_s = 0.02
    message = request(max_tokens=400, stop=["brown f"])
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(message))
        await eventually(lambda: fleet.decode.open_calls == 0)
    assert answer.text == "the quick "
    assert answer.completion.finish_reason == 1
    assert answer.completion.usage.completion_tokens == len("the quick brown f")
    assert fleet.decode.emitted < 200


async def test_a_stop_string_in_the_first_token_cancels_both_legs(
    model: Path, fleet: Fleet
) -> None:
    fleet.prefill.hold_open_s = 60
    fleet.prefill.seals = False
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request(stop=["t"])))
        await eventually(lambda: fleet.prefill.open_calls + fleet.decode.open_calls == 0)
    assert (answer.text, answer.token_ids) == ("", [answer_token(0, 0)])


async def test_multi_byte_text_streams_as_valid_text(model: Path, fleet: Fleet) -> None:
    text = "日本語 🦊 é " * 3
    tokens = token_ids(text)
    fleet.prefill.answer = fleet.decode.answer = tokens
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        answer = await collect(served.stub.Generate(request(max_tokens=len(tokens))))
    assert answer.text == text
    assert all("\ufffd" not in delta.text for delta in answer.deltas)


async def test_a_reader_that_never_reads_stalls_nobody_else(model: Path, fleet: Fleet) -> None:
    fleet.decode.tokens_per_message = 16
    fleet.prefill.answer = fleet.decode.answer = token_ids("x" * 300)
    settings = {"output_capacity": "16"}
    async with running(*fleet.workers), router(model, fleet.workers, **settings) as served:
        slow = served.stub.Generate(request(max_tokens=200_000))
        await slow.read()
        await asyncio.sleep(0.1)
        async with asyncio.timeout(30):  # the slow reader would never let them through
            answers = await asyncio.gather(
                *(collect(served.stub.Generate(request(max_tokens=20))) for _ in range(5))
            )
        assert all(len(answer.token_ids) == 20 for answer in answers)
        # What the slow reader's request may hold is bounded: decode waits instead.
        held = fleet.decode.emitted
        await asyncio.sleep(0.2)
        assert fleet.decode.emitted < 200_000
        assert fleet.decode.emitted - held < 50_000
        slow.cancel()


async def test_log_probabilities_come_only_when_asked_for(model: Path, fleet: Fleet) -> None:
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        plain = await collect(served.stub.Generate(request()))
        asked = await collect(served.stub.Generate(request(logprobs=True)))
    assert not any(delta.logprobs for delta in plain.deltas)
    assert [value for delta in asked.deltas for value in delta.logprobs] == [-0.5] * 8


async def test_the_model_and_its_workers_are_told(model: Path, fleet: Fleet) -> None:
    async with running(*fleet.workers), router(model, fleet.workers, model_name="m") as served:
        told = await served.stub.GetModel(router_pb2.GetModelRequest())
    assert (told.model_name, told.model_digest, told.context_length) == ("m", "d1", 512)
    assert told.accepts_images
    assert told.max_images == 8
    assert [(w.role, w.healthy, w.in_flight) for w in told.workers] == [
        ("decode", True, 0),
        ("encoder", True, 0),
        ("prefill", True, 0),
    ]


async def test_tokens_that_come_faster_than_messages_may_share_one(tokenizer: Tokenizer) -> None:
    output = OutputStream(
        IncrementalDetokenizer(tokenizer), StopStringScanner(()), frozenset(), 100, coalesce_s=30.0
    )
    deltas = output.deltas()
    await output.push(token_ids("a"), [])
    assert (await anext(deltas)).text == "a"  # type: ignore[union-attr]
    second = asyncio.ensure_future(anext(deltas))
    for token in token_ids("bcd"):
        await output.push([token], [])
        await asyncio.sleep(0)
    assert not second.done()
    second.cancel()


async def test_the_end_of_an_answer_waits_for_no_message(tokenizer: Tokenizer) -> None:
    output = OutputStream(
        IncrementalDetokenizer(tokenizer), StopStringScanner(()), frozenset(), 100, coalesce_s=30.0
    )
    deltas = output.deltas()
    await output.push(token_ids("a"), [])
    await anext(deltas)
    await output.push(token_ids("bc"), [])
    output.complete(DONE)
    async with asyncio.timeout(10):
        assert (await anext(deltas)).text == "bc"  # type: ignore[union-attr]
        assert await anext(deltas) is DONE
