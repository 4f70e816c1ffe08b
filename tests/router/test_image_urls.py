"""Images by URL: from allowed hosts at allowed addresses, within bounds, or not at all."""

import asyncio
import base64
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpcore2
import openai
import pytest

from epd.config import ConfigError
from epd.errors import InvalidRequestError, ResourceExhaustedError
from epd.v1 import router_pb2
from services.router.image_urls.address_rule import AddressRule
from services.router.image_urls.allowed_hosts import AllowedHosts
from services.router.image_urls.config import ImageUrlConfig
from services.router.image_urls.downloads import Downloads
from services.router.image_urls.guarded_backend import ForbiddenAddressError, GuardedBackend
from tests.router.harness import failure, request, router, running
from tests.router.image_host import authority_file, image_host
from tests.support.answer import collect
from tests.support.openai_client import openai_client

IMAGE = b"an image file"
FIELD = "conversation.messages[0].parts[0].image_url"
PUBLIC = ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
NOT_PUBLIC = [
    "127.0.0.1",
    "127.8.9.10",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "100.100.100.200",
    "169.254.169.254",
    "168.63.129.16",
    "192.88.99.1",
    "198.18.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:0:7f00:1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "2001:0:7f00:1::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%lo",
    "fec0::1",
    "ff02::1",
    "3fff::1",
    "localhost",
    "",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_may_be_connected_to(address):
    assert AddressRule().allows(address)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_no_other_address_may_be_connected_to(address):
    assert not AddressRule().allows(address)


def test_a_network_of_the_operators_choice_may_be_connected_to_and_its_neighbour_not():
    rule = AddressRule(["10.1.0.0/16", "fd00:1::/32"])
    assert rule.allows("10.1.2.3")
    assert rule.allows("::ffff:10.1.2.3")
    assert rule.allows("fd00:1::5")
    assert not rule.allows("10.2.2.3")
    assert not rule.allows("fd00:2::5")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://images.test/a", "IMAGE_URL"),
        ("file://images.test/a", "IMAGE_URL"),
        ("ftp://images.test/a", "IMAGE_URL"),
        ("images.test/a", "IMAGE_URL"),
        ("", "IMAGE_URL"),
        ("https://", "IMAGE_URL"),
        ("https:///a", "IMAGE_URL"),
        ("https://user:secret@images.test/a", "IMAGE_URL"),
        ("https://images.test@evil.test/a", "IMAGE_URL"),
        ("https://images.test\\@evil.test/a", "IMAGE_URL"),
        ("https://images.test:99999/a", "IMAGE_URL"),
        ("https://images.test:x/a", "IMAGE_URL"),
        ("https://images.test/a b", "IMAGE_URL"),
        ("https://images.test/a\r\nhost: evil.test", "IMAGE_URL"),
        ("https://im\u00e4ges.test/a", "IMAGE_URL"),
        ("https://[::1]/a", "IMAGE_URL"),
        ("https://images.test/" + "a" * 5000, "IMAGE_URL"),
        ("https://evil.test/a", "IMAGE_URL_HOST"),
        ("https://images.test.evil.test/a", "IMAGE_URL_HOST"),
        ("https://notimages.test/a", "IMAGE_URL_HOST"),
        ("https://images.test:8443/a", "IMAGE_URL_HOST"),
        ("https://127.0.0.1/a", "IMAGE_URL_HOST"),
        ("https://2130706433/a", "IMAGE_URL_HOST"),
        ("https://below.test/a", "IMAGE_URL_HOST"),
    ],
)
def test_a_url_off_the_list_is_refused_by_its_text_alone(url, reason):
    hosts = AllowedHosts(["images.test", ".below.test"])
    with pytest.raises(InvalidRequestError) as refused:
        hosts.checked(url, FIELD)
    assert refused.value.reason == reason
    assert refused.value.field == FIELD


def test_a_listed_host_and_hosts_below_a_listed_name_are_allowed():
    hosts = AllowedHosts(["Images.test", ".below.test", "odd.test:8443"])
    checked = hosts.checked("https://IMAGES.test./a/b%20c?d=e#f", FIELD)
    assert (checked.host, checked.port, checked.target) == ("images.test", 443, "/a/b%20c?d=e")
    assert hosts.checked("https://x.y.below.test", FIELD).target == "/"
    assert hosts.checked("https://odd.test:8443/", FIELD).port == 8443


@pytest.mark.parametrize("entry", ["*", "https://images.test", "images.test/a", "a:b", "."])
def test_a_list_that_says_something_else_stops_the_start(entry):
    with pytest.raises(ValueError, match="image_url_hosts"):
        ImageUrlConfig(image_url_hosts=(entry,))


@contextlib.asynccontextmanager
async def downloads(host, names=None, **settings):
    """Downloads from ``host`` under the names images.test and inner.test; ``names`` maps them."""
    config = ImageUrlConfig(
        **{
            "image_url_hosts": (f"images.test:{host.port}", f"inner.test:{host.port}"),
            "image_url_networks": ("127.0.0.1/32",),
            "image_url_ca_file": authority_file(),
            "image_url_timeout_s": 20.0,
            **settings,
        }
    )

    def resolve(name, port):
        found = (names or {}).get(name, ["127.0.0.1"])
        return found() if callable(found) else found

    found = Downloads(config, 1000, resolve)
    try:
        yield found
    finally:
        await found.close()


async def refusal(found, url, hold=lambda size: None):
    with pytest.raises(InvalidRequestError) as refused:
        await found.download(url, FIELD, hold)
    assert refused.value.field == FIELD
    return refused.value.reason.removeprefix("IMAGE_URL_")


async def test_a_file_comes_as_it_is_and_its_bytes_are_accounted_for():
    held: list[int] = []
    async with image_host() as host, downloads(host) as found:
        host.file("/a.png?size=1", IMAGE)
        url = f"https://images.test:{host.port}/a.png?size=1"
        assert await found.download(url, FIELD, held.append) == IMAGE
    assert sum(held) == len(IMAGE)


async def test_a_redirect_within_the_list_is_followed():
    async with image_host() as host, downloads(host) as found:
        host.redirect("/old", "/relative")
        host.redirect("/relative", f"https://inner.test:{host.port}/new")
        host.file("/new", IMAGE)
        url = f"https://images.test:{host.port}/old"
        assert await found.download(url, FIELD, lambda size: None) == IMAGE


@pytest.mark.parametrize("address", NOT_PUBLIC)
async def test_a_name_of_a_forbidden_address_is_refused_without_a_connection(address):
    names = {"images.test": [address]}
    async with image_host() as host, downloads(host, names, image_url_networks=()) as found:
        assert await refusal(found, f"https://images.test:{host.port}/a") == "ADDRESS"
        assert host.connections == 0


async def test_a_name_with_an_allowed_and_a_forbidden_address_is_refused():
    names = {"images.test": ["127.0.0.1", "127.0.0.2"]}
    async with image_host() as host, downloads(host, names) as found:
        assert await refusal(found, f"https://images.test:{host.port}/a") == "ADDRESS"
        assert host.connections == 0


async def test_a_redirect_to_a_forbidden_address_is_not_followed():
    names = {"inner.test": ["127.0.0.2"]}
    async with (
        image_host() as host,
        image_host("127.0.0.2", host.port) as inner,
        downloads(host, names) as found,
    ):
        inner.file("/secret", IMAGE)
        host.redirect("/a", f"https://inner.test:{host.port}/secret")
        assert await refusal(found, f"https://images.test:{host.port}/a") == "ADDRESS"
        assert (host.connections, inner.connections) == (1, 0)


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("http://images.test/a", "IMAGE_URL"),
        ("https://127.0.0.1/a", "HOST"),
        ("https://169.254.169.254/latest/meta-data", "HOST"),
        ("//evil.test/a", "HOST"),
        ("file://images.test/a", "IMAGE_URL"),
        ("https://[::1", "IMAGE_URL"),
    ],
)
async def test_a_redirect_off_the_list_is_not_followed(location, reason):
    async with image_host() as host, downloads(host) as found:
        host.redirect("/a", location)
        assert await refusal(found, f"https://images.test:{host.port}/a") == reason
        assert host.connections == 1


async def test_a_name_whose_address_changes_after_the_check_gains_nothing_by_it():
    """The connection goes to the address that was checked; the name is looked up once."""
    answers = [["127.0.0.1"], ["127.0.0.2"]]
    async with (
        image_host() as host,
        image_host("127.0.0.2", host.port) as inner,
        downloads(host, {"images.test": lambda: answers.pop(0)}) as found,
    ):
        host.file("/a", IMAGE)
        url = f"https://images.test:{host.port}/a"
        assert await found.download(url, FIELD, lambda size: None) == IMAGE
        assert len(answers) == 1
        assert await refusal(found, url) == "ADDRESS"
        assert (host.connections, inner.connections) == (1, 0)


async def test_bounds_on_size_time_and_redirects_hold():
    never = asyncio.Event()

    async def endless(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"64\r\n" + b"x" * 100 + b"\r\n")
            await writer.drain()

    async def silent(reader, writer):
        await never.wait()

    async with image_host() as host, downloads(host) as found:
        base = f"https://images.test:{host.port}"
        host.file("/long", b"x" * 1001)
        host.answers["/endless"] = endless
        host.redirect("/loop", "/loop")
        assert await refusal(found, f"{base}/long") == "TOO_LARGE"
        assert await refusal(found, f"{base}/endless") == "TOO_LARGE"
        assert await refusal(found, f"{base}/loop") == "REDIRECTS"
        assert host.requests.count("/loop") == 4
        async with downloads(host, image_url_timeout_s=0.5) as hasty:
            host.answers["/silent"] = silent
            assert await refusal(hasty, f"{base}/silent") == "TIMEOUT"
        never.set()


async def test_what_is_no_file_is_refused():
    async def cut(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort")

    async def noise(reader, writer):
        writer.write(b"\x00\x01\x02 no http at all\r\n\r\n")

    async with image_host() as host, downloads(host, {"inner.test": []}) as found:
        base = f"https://images.test:{host.port}"
        host.file("/zip", IMAGE, content_encoding="gzip")
        host.answers |= {"/cut": cut, "/noise": noise}
        assert await refusal(found, f"{base}/missing") == "STATUS"
        assert await refusal(found, f"{base}/zip") == "CODING"
        assert await refusal(found, f"{base}/cut") == "UNREACHABLE"
        assert await refusal(found, f"{base}/noise") == "UNREACHABLE"
        assert await refusal(found, f"https://inner.test:{host.port}/") == "UNREACHABLE"


async def test_a_certificate_of_another_name_or_an_unknown_authority_is_refused():
    async with image_host() as host:
        url = f"https://other.test:{host.port}/a"
        async with downloads(host, image_url_hosts=(f"other.test:{host.port}",)) as found:
            assert await refusal(found, url) == "UNREACHABLE"
        async with downloads(host, image_url_ca_file=None) as found:
            assert await refusal(found, f"https://images.test:{host.port}/a") == "UNREACHABLE"
        assert host.requests == []


async def test_bytes_that_there_is_no_room_for_end_the_download():
    def full(size):
        raise ResourceExhaustedError("full")

    async with image_host() as host, downloads(host) as found:
        host.file("/a", IMAGE)
        with pytest.raises(ResourceExhaustedError):
            await found.download(f"https://images.test:{host.port}/a", FIELD, full)


def by_url(url, **fields):
    asked = request("hello", **fields)
    asked.conversation.messages[0].parts.insert(0, router_pb2.ContentPart(image_url=url))
    return asked


@contextlib.asynccontextmanager
async def open_router(model, fleet, host, **settings):
    allowed = {
        "image_url_hosts": f"localhost:{host.port}",
        "image_url_networks": "127.0.0.0/8,::1/128",
        "image_url_ca_file": str(authority_file()),
    }
    async with (
        running(*fleet.workers),
        router(model, fleet.workers, model_name="m", **allowed, **settings) as served,
    ):
        yield served


async def test_an_image_by_url_is_answered_like_its_file_over_grpc_and_http(model, fleet):
    async with image_host() as host, open_router(model, fleet, host) as served:
        host.file("/a.png", IMAGE)
        url = f"https://localhost:{host.port}/a.png"
        expected = await collect(served.stub.Generate(request("hello", [IMAGE], seed=3)))
        found = await collect(served.stub.Generate(by_url(url, seed=3)))
        assert found.token_ids == expected.token_ids
        assert [call.images[0].data for call in fleet.encoder.requests] == [IMAGE, IMAGE]
        assert len({call.images[0].digest for call in fleet.encoder.requests}) == 1
        stages = [timing.stage for timing in found.completion.timings]
        assert stages[0] == "router.image_download"

        client = openai_client(served.http)
        parts = [{"type": "image_url", "image_url": {"url": url}}] * 2
        parts.append({"type": "text", "text": "hello"})
        asked: dict[str, Any] = {
            "messages": [{"role": "user", "content": parts}],
            "seed": 3,
            "max_tokens": 8,
        }
        before = len(host.requests)
        answer = await client.chat.completions.create(model="m", n=3, **asked)
        assert len(answer.choices) == 3
        # Twice in the request, three answers: one download.
        assert len(host.requests) == before + 1
        data = "data:image/png;base64," + base64.b64encode(IMAGE).decode()
        parts[0] = parts[1] = {"type": "image_url", "image_url": {"url": data}}
        inline = await client.chat.completions.create(model="m", n=3, **asked)
        assert [c.message.content for c in inline.choices] == [
            c.message.content for c in answer.choices
        ]
        parts[1] = {"type": "image_url", "image_url": {"url": "https://evil.test/a"}}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", **asked)
        assert refused.value.param == "messages[0].content[1].image_url.url"
        assert refused.value.code == "image_url_host"
        await client.close()
        count = router_pb2.CountTokensRequest(conversation=by_url(url).conversation)
        assert (await served.stub.CountTokens(count)).token_count > 0


async def test_urls_are_off_by_default(model, fleet):
    async with running(*fleet.workers), router(model, fleet.workers) as served:
        error = await failure(served.stub.Generate(by_url("https://example.org/a.png")))
    assert error.code().name == "UNIMPLEMENTED"
    assert fleet.encoder.requests == []


async def test_a_download_counts_against_the_image_memory_of_the_router(model, fleet):
    async with (
        image_host() as host,
        open_router(model, fleet, host, max_live_image_bytes="5") as served,
    ):
        host.file("/a.png", IMAGE)
        error = await failure(served.stub.Generate(by_url(f"https://localhost:{host.port}/a.png")))
        assert error.code().name == "RESOURCE_EXHAUSTED"


async def test_a_cancelled_request_ends_its_download(model, fleet):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait(reader, writer):
        begun.set()
        await reader.read()
        ended.set()

    async with image_host() as host, open_router(model, fleet, host) as served:
        host.answers["/slow"] = wait
        call = served.stub.Generate(by_url(f"https://localhost:{host.port}/slow"))
        reading = asyncio.create_task(collect(call))
        async with asyncio.timeout(15):
            await begun.wait()
            call.cancel()
            await ended.wait()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_file_of_certificates_that_is_not_there_stops_the_start(model, fleet):
    settings = {"image_url_hosts": "images.test", "image_url_ca_file": "/nowhere.pem"}
    async with running(*fleet.workers):
        with pytest.raises(ConfigError, match="image-url-ca-file"):
            async with router(model, fleet.workers, **settings):
                pass


async def test_a_connection_that_leads_elsewhere_than_it_was_asked_to_is_closed(monkeypatch):
    """What translates addresses on the way is seen by what the system says of the connection."""

    class Elsewhere(httpcore2.AsyncMockStream):
        def get_extra_info(self, info):
            return ("10.0.0.1", 443) if info == "server_addr" else None

    class Network(httpcore2.AsyncMockBackend):
        async def connect_tcp(self, *arguments, **options):
            return stream

    stream = Elsewhere([b"secret"])
    with ThreadPoolExecutor(1) as threads:
        guarded = GuardedBackend(AddressRule(), threads, lambda host, port: ["8.8.8.8"])
        monkeypatch.setattr(guarded, "_backend", Network([]))
        with pytest.raises(ForbiddenAddressError):
            await guarded.connect_tcp("images.test", 443)
        with pytest.raises(ForbiddenAddressError):
            await guarded.connect_unix_socket("/run/docker.sock")
    with pytest.raises(httpcore2.ReadError):
        await stream.read(1)  # closed
