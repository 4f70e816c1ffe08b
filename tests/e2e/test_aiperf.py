"""aiperf, unmodified, against real workers."""

import socket

import pytest

from tests.support.aiperf import VERSION, Aiperf
from tests.support.process_group import CommandFailedError

pytestmark = [pytest.mark.full, pytest.mark.timeout(1080)]

REQUESTS = 8
CONCURRENCY = 2
#: All answers are so long: the model does not end them.
TOKENS = 32


@pytest.fixture(scope="module")
def aiperf(request):
    installed = Aiperf(request.config.cache.mkdir("clients"))
    try:
        installed.install()
    except CommandFailedError as error:
        pytest.skip(f"aiperf {VERSION} cannot be installed: {str(error).splitlines()[-1]}")
    return installed


@pytest.fixture
def outside():
    """Stands for every other host: a proxy that answers nobody and shows whether somebody came."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


@pytest.mark.parametrize("images", [0, 1], ids=["text", "images"])
def test_aiperf_measures_streamed_chats_and_all_of_them_succeed(
    images, aiperf, outside, model, shared_fleets, tmp_path
):
    fleet = shared_fleets.get(model)
    idle = fleet.idle_level()
    options = [
        *("--model", model.name, "--tokenizer", str(model)),
        *("--url", f"http://{fleet.http_address}", "--endpoint-type", "chat", "--streaming"),
        *("--concurrency", str(CONCURRENCY), "--request-count", str(REQUESTS)),
        *("--synthetic-input-tokens-mean", "60", "--output-tokens-mean", str(TOKENS)),
        # A random model's bytes are no text, so only the server knows how many tokens they were.
        *("--extra-inputs", "ignore_eos:true", "--use-server-token-count"),
        *("--random-seed", "5"),
    ]
    if images:
        size = ("--image-width-mean", "64", "--image-height-mean", "64")
        options += [*size, "--image-batch-size", str(images)]
    before = encode_calls(fleet)

    proxy = "http://{}:{}".format(*outside.getsockname())
    results = aiperf.profile(tmp_path / "artifacts", options, proxy)

    with pytest.raises(BlockingIOError):  # nobody asked for another host
        outside.accept()
    assert results["is_complete"]
    assert not results["was_cancelled"]
    assert results["error_summary"] == []
    assert results["request_count"]["avg"] == REQUESTS
    assert "error_request_count" not in results  # it leaves out what is 0
    assert results["request_error_rate"]["avg"] == 0
    first, whole = results["time_to_first_token"], results["request_latency"]
    assert first["count"] == whole["count"] == REQUESTS
    assert 0 < first["min"] <= first["avg"] < whole["avg"]
    assert whole["max"] <= results["benchmark_duration"]["avg"] * 1000
    length = results["output_sequence_length"]
    assert (length["min"], length["max"], length["count"]) == (TOKENS, TOKENS, REQUESTS)
    between = results["inter_token_latency"]
    assert between["count"] == REQUESTS
    assert between["avg"] > 0  # of one answer it may be 0: bytes that are no text yet wait
    assert encode_calls(fleet) - before == (REQUESTS if images else 0)
    fleet.assert_back_to_idle(idle)


def encode_calls(fleet):
    """Calls that the encoder has ended: one for each request with images."""
    method = "epd.v1.EncoderService/Encode"
    scraped = fleet.scrape("encoder-0")
    return scraped.total("rpc_server_call_duration_seconds_count", rpc_method=method)
