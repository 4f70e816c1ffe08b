"""Log lines with the id of the request they belong to."""

import logging

from epd.rpc.request_context import request_id

_FORMAT = "%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s"


class _RequestIdFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request = f" [{request_id()}]" if request_id() else ""
        return True


def configure_logging(level: str) -> None:
    """Logs to standard error; standard output belongs to the READY line."""
    handler = logging.StreamHandler()
    handler.addFilter(_RequestIdFilter())
    logging.basicConfig(level=level, format=_FORMAT, handlers=[handler])
