"""The status that a piece of work ends with, told by name."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from epd.errors import EpdError


@contextlib.contextmanager
def status_name_to(end: Callable[[str], None]) -> Iterator[None]:
    """Calls ``end`` with OK, or with what the exception stands for that the block ends with."""
    code = "OK"
    try:
        yield
    except EpdError as error:
        code = error.code
        raise
    except asyncio.CancelledError:
        code = "CANCELLED"
        raise
    except BaseException:
        code = "UNKNOWN"
        raise
    finally:
        end(code)
