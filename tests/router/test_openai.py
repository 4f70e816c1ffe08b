"""The official OpenAI client, unmodified, gets over HTTP what gRPC clients get."""

import asyncio
import base64
import json

import grpc
import openai
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from epd.errors import InvalidRequestError, ResourceExhaustedError, UnavailableError
from epd.image_digest import image_digest
from epd.text.tokenizer import Tokenizer
from tests.router.harness import eventually, request, router, running
from tests.support.answer import collect
from tests.support.openai_client import openai_client

HELLO = [{"role": "user", "content": "hello"}]
IMAGE = b"an image file"
IMAGE_URL = "data:image/png;base64," + base64.b64encode(IMAGE).decode()


@pytest.fixture
async def served(model, fleet):
    async with running(*fleet.workers), router(model, fleet.workers, model_name="m") as found:
        yield found


@pytest.fixture
async def client(served):
    async with openai_client(served.http) as found:
        yield found


async def chat(client, **fields):
    return await client.chat.completions.create(
        **{"model": "m", "messages": HELLO, "max_tokens": 8, "seed": 3, **fields}
    )


async def test_a_chat_answer_is_the_answer_that_grpc_gives(served, client):
    expected = await collect(served.stub.Generate(request("hello", seed=3)))
    answer = await chat(client)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == "length"
    usage = expected.completion.usage
    assert answer.usage.prompt_tokens == usage.prompt_tokens
    assert answer.usage.completion_tokens == usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details.cached_tokens == usage.cached_tokens == 3


async def test_a_streamed_answer_is_the_whole_one_in_pieces(client):
    whole = await chat(client)
    stream = await chat(client, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    *told, usage = chunks
    assert told[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in told)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in told[:-1]] == [None] * len(told[:-1])
    assert told[-1].choices[0].finish_reason == "length"
    assert (usage.choices, usage.usage) == ([], whole.usage)
    assert {chunk.id for chunk in chunks} == {usage.id}
    without = [chunk async for chunk in await chat(client, stream=True)]
    assert all(chunk.usage is None and chunk.choices for chunk in without)


async def test_tokens_are_streamed_as_they_come(fleet, client):
    fleet.decode.token_s = 0.05
    pieces = [
        chunk.choices[0].delta.content
        async for chunk in await chat(client, stream=True, max_tokens=6)
        if chunk.choices[0].delta.content
    ]
    assert len(pieces) > 3


async def test_log_probabilities_spell_the_answer(client):
    answer = await chat(client, logprobs=True)
    content = answer.choices[0].logprobs.content
    assert bytes(b for token in content for b in token.bytes).decode() == (
        answer.choices[0].message.content
    )
    assert {token.logprob for token in content} == {-0.5}
    assert (await chat(client)).choices[0].logprobs is None


async def test_data_urls_reach_the_encoder_as_the_files_they_hold(fleet, client):
    parts = [
        {"type": "image_url", "image_url": {"url": IMAGE_URL, "detail": "auto"}},
        {"type": "text", "text": "what is it?"},
    ]
    answer = await chat(client, messages=[{"role": "user", "content": parts}])
    assert fleet.encoder.seen == [image_digest("d1", "p1", IMAGE)]
    assert answer.usage.prompt_tokens > 5
    await eventually(lambda: not fleet.encoder.held)


async def test_every_sampling_field_reaches_the_workers(fleet, client):
    await chat(
        client,
        max_tokens=None,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"7": -2, "9": 3.5},
        logprobs=True,
        top_logprobs=4,
        seed=-1,
        extra_body={
            "top_k": 5,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [4],
        },
    )
    for worker in (fleet.prefill, fleet.decode):
        sampling = worker.requests[-1].sampling
        assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (9, 2, 5)
        assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.25, 0.125)
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
        assert (sampling.repetition_penalty, sampling.top_logprobs) == (1.5, 4)
        assert dict(sampling.logit_bias) == {7: -2.0, 9: 3.5}
        assert (sampling.ignore_eos, list(sampling.stop_token_ids)) == (True, [4])
        assert sampling.seed == 2**64 - 1


async def test_without_a_limit_an_answer_may_fill_the_context(fleet, client):
    fleet.prefill.first_token_ends = True
    await chat(client, max_tokens=None, seed=None)
    sampling = fleet.prefill.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature) == (512, 1.0)


@pytest.mark.parametrize("stop", ["o", ["zz", "o"]])
async def test_stop_strings_end_the_answer_and_are_not_part_of_it(client, stop):
    whole = (await chat(client, max_tokens=40)).choices[0].message.content
    answer = await chat(client, max_tokens=40, stop=stop)
    assert answer.choices[0].message.content == whole.partition("o")[0]
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("prompt", ["hello", [72, 101], ["hello"], [[72, 101]]])
async def test_completions_take_text_and_tokens(served, client, prompt):
    inner = prompt[0] if isinstance(prompt[0], str | list) and len(prompt) == 1 else prompt
    message = request(seed=3, max_tokens=16)
    if isinstance(inner, str):
        message.text_prompt = inner
    else:
        message.token_prompt.token_ids.extend(inner)
    expected = await collect(served.stub.Generate(message))
    answer = await client.completions.create(model="m", prompt=prompt, seed=3, logprobs=0)
    (choice,) = answer.choices
    assert choice.text == expected.text
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == list(range(16))
    assert len(choice.logprobs.token_logprobs) == 16
    stream = await client.completions.create(model="m", prompt=prompt, seed=3, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == "length"


async def complete(client, **fields):
    return await client.completions.create(**{"model": "m", "seed": 3, "max_tokens": 8, **fields})


async def test_completions_of_several_prompts_are_those_of_each_in_order(fleet, client):
    prompts = ["hello", "hello again", "hi"]
    alone = [await complete(client, prompt=prompt, n=2) for prompt in prompts]
    answer = await complete(client, prompt=prompts, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [
        choice.text for one in alone for choice in one.choices
    ]
    assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    assert answer.usage.completion_tokens == 6 * 8
    texts = [""] * 6
    usage = None
    async for chunk in await complete(
        client, prompt=prompts, n=2, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]
    assert usage is not None
    assert usage.prompt_tokens == answer.usage.prompt_tokens
    tokens = await complete(client, prompt=[[72, 101], [73]])
    assert tokens.usage.prompt_tokens == 3


async def test_no_prompt_waits_for_another(fleet, client):
    fleet.prefill.token_s = 1e-6
    async with asyncio.TaskGroup() as group, fleet.prefill.engine:
        group.create_task(complete(client, prompt=["one", "two", "three"]))
        await eventually(lambda: fleet.prefill.open_calls == 3)


@pytest.mark.parametrize("prompt", [["hello", "bye"], "hello", [[39, 68]]])
async def test_an_echo_begins_with_the_prompt(model, client, prompt):
    spelled = Tokenizer.from_folder(model)
    several = prompt if isinstance(prompt, list) else [prompt]
    texts = [p if isinstance(p, str) else spelled.decode(p) for p in several]
    plain = await complete(client, prompt=prompt)
    answer = await complete(client, prompt=prompt, echo=True)
    expected = [text + choice.text for text, choice in zip(texts, plain.choices, strict=True)]
    assert [choice.text for choice in answer.choices] == expected
    streamed = [""] * len(texts)
    async for chunk in await complete(client, prompt=prompt, echo=True, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": ["x"] * 33}, "prompt"),
        ({"prompt": ["x", 3]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], [True]]}, "prompt"),
    ],
)
async def test_completions_that_cannot_be_made_are_refused_by_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        await complete(client, **fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"user": "me"}, "user", "unsupported_field"),
        ({"store": True}, "store", "unsupported_value"),
        ({"n": 99}, "n", "invalid_request"),
        ({"n": 0}, "n", "invalid_request"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", None),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs", "invalid_request"),
        ({"audio": {}}, "audio", "unsupported_field"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name", None),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", None),
        ({"messages": []}, "messages", "invalid_request"),
        ({"messages": "x"}, "messages", "wrong_type"),
        ({"temperature": "hot"}, "temperature", "wrong_type"),
        ({"temperature": -1}, "temperature", "invalid_request"),
        ({"max_tokens": True}, "max_tokens", "wrong_type"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_request"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_request"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_request"),
        ({"extra_body": {"best_answer": 1}}, "best_answer", "unsupported_field"),
    ],
)
async def test_what_is_not_understood_is_refused_by_name_and_never_ignored(
    client, fields, param, code
):
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(client, **fields)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"
    assert code is None or refused.value.code == code


@pytest.mark.parametrize(
    ("url", "param"),
    [
        ("https://example.org/a.png", "messages[0].content[0].image_url.url"),
        ("data:text/plain;base64,AAAA", "messages[0].content[0].image_url.url"),
        ("data:image/png;base64,???", "messages[0].content[0].image_url.url"),
    ],
)
async def test_images_that_are_no_data_urls_are_refused(client, url, param):
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(client, messages=[{"role": "user", "content": [part]}])
    assert refused.value.param == param


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "name", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"extra_body": {"structured_outputs": {"regex": "[ab]+"}}}, "regex", "[ab]+"),
        ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, "json_schema", None),
        ({"response_format": {"type": "text"}}, None, None),
    ],
)
async def test_formats_reach_both_workers_as_grammars(fleet, client, fields, name, text):
    await chat(client, **fields)
    for worker in (fleet.prefill, fleet.decode):
        constraint = worker.requests[-1].sampling.constraint
        assert constraint.WhichOneof("grammar") == name
        assert text is None or getattr(constraint, name) == text


async def test_a_grammar_that_is_too_long_is_refused_before_any_worker_hears_of_it(fleet, client):
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(client, extra_body={"structured_outputs": {"regex": "a" * 70_000}})
    assert refused.value.param == "response_format"
    assert fleet.prefill.calls["Prefill"] == 0


async def test_further_choices_start_once_the_first_has_the_prompt_in_the_cache(fleet, client):
    fleet.prefill.prefill_s = 0.1
    answer = await chat(client, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 3 * 8
    one = await chat(client)
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    asked = [worker_request.sampling for worker_request in fleet.prefill.requests[:3]]
    assert sorted(sampling.choice for sampling in asked) == [0, 1, 2]
    assert asked[0].choice == 0
    assert {sampling.seed for sampling in asked} == {3}
    assert min(fleet.prefill.arrived_s[1:3]) >= fleet.prefill.drawn_s[0]


async def test_choices_are_streamed_side_by_side(client):
    whole = await chat(client, n=2)
    texts: dict[int, str] = {}
    reasons = {}
    async for chunk in await chat(client, n=2, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {0: "length", 1: "length"}


async def test_one_choice_that_fails_ends_all(fleet, client):
    fleet.decode.token_s = 0.05
    fleet.prefill.failures = [None, InvalidRequestError("not this one", field="x")]
    with pytest.raises(openai.BadRequestError, match="not this one"):
        await chat(client, n=3, max_tokens=400)
    await eventually(lambda: fleet.decode.open_calls == fleet.prefill.open_calls == 0)


async def test_models_are_listed_and_an_unknown_one_is_not_found(client):
    assert [model.id for model in (await client.models.list()).data] == ["m"]
    assert (await client.models.retrieve("m")).id == "m"
    with pytest.raises(openai.NotFoundError) as missing:
        await chat(client, model="other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="m", input="x")


async def test_statuses_tell_clients_what_to_do(fleet, client):
    fleet.prefill.failures = [ResourceExhaustedError("full", retry_after_s=7)] * 2
    with pytest.raises(openai.RateLimitError) as busy:
        await chat(client)
    assert busy.value.response.headers["retry-after"] == "7"
    fleet.prefill.failures = [InvalidRequestError("bad", field="x")]
    with pytest.raises(openai.BadRequestError):
        await chat(client, stream=True)  # before the first token a stream has a status too
    fleet.prefill.failures = [UnavailableError("gone")] * 3
    with pytest.raises(openai.InternalServerError) as lost:
        await chat(client)
    assert lost.value.status_code == 503
    assert lost.value.response.headers["x-request-id"]


async def test_an_error_after_the_first_token_is_raised_by_the_stream(model, fleet):
    fleet.decode.failures = [InvalidRequestError("broken after all", field="x")]
    # Decode's error is told when prefill's call has ended, which is after its token.
    settings = {"model_name": "m", "culprit_grace_s": "30"}
    async with (
        running(*fleet.workers),
        router(model, fleet.workers, **settings) as served,
        openai_client(served.http) as client,
    ):
        stream = await chat(client, stream=True)
        with pytest.raises(openai.APIError, match="broken after all"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_goes_away_ends_every_leg(fleet, client, streams):
    fleet.decode.token_s = 0.02
    asking = asyncio.create_task(chat(client, stream=streams, max_tokens=500))
    await eventually(lambda: fleet.decode.emitted > 2)
    if streams:
        await (await asking).close()
    else:
        asking.cancel()
    await eventually(lambda: fleet.decode.open_calls == fleet.prefill.open_calls == 0)
    assert fleet.decode.emitted < 400, "it ended by itself"


async def test_one_trace_goes_from_the_client_through_http_to_the_workers(served, fleet, client):
    exporter = InMemorySpanExporter()
    served.telemetry.tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    parent = f"00-{trace_id}-b7ad6b7169203331-01"
    await chat(client, extra_headers={"traceparent": parent}, stream=False)
    path = "POST /v1/chat/completions"
    await eventually(lambda: any(s.name == path for s in exporter.get_finished_spans()))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    parent_of_chat = spans["chat m"].parent
    assert parent_of_chat is not None
    assert parent_of_chat.span_id == spans[path].context.span_id
    assert dict(spans[path].attributes or {})["http.response.status_code"] == 200
    assert trace_id in fleet.prefill.traceparents[-1]
    assert trace_id in fleet.decode.traceparents[-1]


async def test_a_stream_finishes_while_the_router_drains(model, fleet):
    fleet.decode.token_s = 0.02
    async with (
        running(*fleet.workers),
        router(model, fleet.workers, model_name="m", drain_grace_s="30") as served,
        openai_client(served.http) as client,
    ):
        stream = await chat(client, stream=True, max_tokens=60)
        chunks = [await anext(stream)]
        stopping = asyncio.create_task(served.server.stop())
        await eventually(lambda: served.server.draining)
        chunks += [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        await stopping
        with pytest.raises(openai.APIConnectionError):
            await _refused(client)


async def _refused(client):
    """Asks until the listening socket is closed."""
    async with asyncio.timeout(20):
        while True:
            await client.models.list()
            await asyncio.sleep(0.05)


async def test_both_faces_count_as_live_requests(model, fleet):
    """One Generation path: the limit on live requests holds over HTTP and gRPC together."""
    fleet.decode.token_s = 0.05
    async with (
        running(*fleet.workers),
        router(model, fleet.workers, model_name="m", max_requests="1") as served,
        openai_client(served.http) as client,
    ):
        stream = await chat(client, stream=True, max_tokens=500)
        with pytest.raises(grpc.aio.AioRpcError) as full:
            await collect(served.stub.Generate(request()))
        assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(openai.RateLimitError):
            await chat(client)
        await stream.close()
