"""Names in image URLs that no name server can be asked for."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpcore2
import pytest

from services.router.image_urls.address_rule import AddressRule
from services.router.image_urls.guarded_backend import GuardedBackend


@pytest.fixture
def backend() -> Iterator[GuardedBackend]:
    with ThreadPoolExecutor(1) as threads:
        yield GuardedBackend(AddressRule(), threads)


@pytest.mark.parametrize("label", ["", "a" * 64])
async def test_a_label_that_is_empty_or_too_long_is_a_name_that_is_not_found(
    backend: GuardedBackend, label: str
) -> None:
    with pytest.raises(httpcore2.ConnectError):
        await backend.connect_tcp(f"a.{label}.images.test", 443)
