"""The typed client and the chat command against a real router."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import use_span
from typer.testing import CliRunner

from epd import errors
from epd.cli.main import app
from epd.client import EpdClient, Image, Message, RawText, Sampling, Tokens
from epd.client.prompts import ImageSource
from epd.image_digest import image_digest
from epd.sampling import FinishReason
from tests.router.conftest import Fleet
from tests.router.fake_workers import answer_token
from tests.router.harness import eventually, router, running

EIGHT = Sampling(max_tokens=8, seed=0)


@contextlib.asynccontextmanager
async def connected(model: Path, fleet: Fleet) -> AsyncIterator[EpdClient]:
    async with (
        running(*fleet.workers),
        router(model, fleet.workers) as served,
        EpdClient(served.address) as client,
    ):
        yield client


async def test_the_client_streams_deltas_and_knows_the_completion(
    model: Path, fleet: Fleet, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(b"file")
    async with connected(model, fleet) as client:
        images: list[ImageSource] = [tmp_path / "a.png", b"bytes", Image(b"image")]
        stream = client.generate("what?", images=images, sampling=EIGHT, logprobs=True)
        with pytest.raises(RuntimeError):
            _ = stream.completion
        texts = [delta.text async for delta in stream]
        assert "".join(texts) == "the quic"
        assert stream.completion.finish_reason is FinishReason.LENGTH
        assert stream.completion.usage.completion_tokens == 8
        assert stream.completion.usage.image_tokens == 15
        assert stream.completion.timings_ns["router.preprocess"] > 0
        answer = await client.collect("hi", sampling=EIGHT, stop=["qu"])
        assert answer.text == "the "
        assert answer.completion.finish_reason is FinishReason.STOP
    assert [image.data for image in fleet.encoder.requests[0].images] == [
        b"file",
        b"bytes",
        b"image",
    ]


async def test_every_form_of_prompt(model: Path, fleet: Fleet) -> None:
    async with connected(model, fleet) as client:
        messages = [
            Message("system", "be brief"),
            Message("user", ["what is ", Image(b"i"), "?"]),
        ]
        for prompt in (messages, RawText("raw"), Tokens([1, 2, 3])):
            answer = await client.collect(prompt, sampling=EIGHT)
            assert answer.token_ids == tuple(answer_token(0, index) for index in range(8))
        assert await client.count_tokens(RawText("raw")) == 3
        with_image = await client.count_tokens(messages)
        assert with_image == len(fleet.prefill.requests[0].token_ids)
        with pytest.raises(ValueError, match="images"):
            client.generate(RawText("raw"), images=[b"i"])
        told = await client.model()
        assert {worker.role for worker in told.workers} == {"encoder", "prefill", "decode"}
        await eventually(lambda: not fleet.encoder.held)


async def test_errors_are_typed(model: Path, fleet: Fleet) -> None:
    async with connected(model, fleet) as client:
        with pytest.raises(errors.InvalidRequestError) as raised:
            await client.collect("hi", sampling=Sampling(top_p=7))
        assert raised.value.field == "sampling.top_p"
        fleet.prefill.failures = [errors.ResourceExhaustedError("full", retry_after_s=3)]
        with pytest.raises(errors.ResourceExhaustedError) as full:
            await client.collect("hi")
        assert full.value.retry_after_s == 3
        fleet.prefill.prefill_s = 30
        with pytest.raises(errors.DeadlineExceededError):
            await client.collect("hi", timeout_s=0.5)
    async with EpdClient("127.0.0.1:1") as nobody:
        with pytest.raises(errors.UnavailableError):
            await nobody.model()


async def test_f29_an_image_file_that_has_changed_is_another_image(
    model: Path, fleet: Fleet, tmp_path: Path
) -> None:
    file = tmp_path / "a.png"
    async with connected(model, fleet) as client:
        for data in (b"first", b"second", b"first"):
            file.write_bytes(data)
            await client.collect("what?", images=[file], sampling=EIGHT)
    first, second = (image_digest("d1", "p1", data) for data in (b"first", b"second"))
    assert fleet.encoder.seen == [first, second, first]
    used = [call.images[0].handle.digest for call in fleet.prefill.requests]
    assert used == [first, second, first]


async def test_a_request_longer_than_a_message_may_be_is_invalid(model: Path, fleet: Fleet) -> None:
    images = [bytes(12 << 20)] * 3
    async with connected(model, fleet) as client:
        with pytest.raises(errors.InvalidRequestError) as raised:
            await client.collect("what?", images=images)
        with pytest.raises(errors.InvalidRequestError):
            await client.count_tokens("what?", images)
    assert raised.value.reason == "REQUEST_TOO_LARGE"
    assert not fleet.encoder.seen


async def test_leaving_the_stream_cancels_the_request(model: Path, fleet: Fleet) -> None:
    fleet.decode.token_s = 0.2  # minutes in all
    async with connected(model, fleet) as client:
        stream = client.generate("hi", sampling=Sampling(max_tokens=500))
        async for _ in stream:
            stream.cancel()
            break
        await eventually(lambda: fleet.decode.open_calls == 0)


async def test_the_trace_of_an_active_span_goes_along(model: Path, fleet: Fleet) -> None:
    provider = TracerProvider()
    span = provider.get_tracer("test").start_span("mine")
    async with connected(model, fleet) as client:
        with use_span(span):
            await client.collect("hi", sampling=EIGHT)
    trace_id = f"{span.get_span_context().trace_id:032x}"
    assert trace_id in fleet.prefill.traceparents[0]


async def test_chat_streams_to_the_terminal(model: Path, fleet: Fleet, tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(b"file")
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        arguments = ["chat", "what is different?", "--image", str(image), "--image", str(image)]
        arguments += ["--router", served.address, "--max-tokens", "8", "--seed", "0"]
        result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--show-timings"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "the quic\n"
    assert "router.preprocess" in result.stderr
    assert len(fleet.encoder.requests[0].images) == 2


def test_chat_says_which_image_is_missing() -> None:
    result = CliRunner().invoke(app, ["chat", "hi", "--image", "/nowhere.png"])
    assert result.exit_code == 1
    assert "/nowhere.png" in str(result.exception)
