"""Log lines with the id of the request they belong to."""

import logging

from epd.rpc.request_context import request_id

_OURS = ("epd", "services", "__main__")
_FORMAT = "%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s"


class _RequestIdFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request = f" [{request_id()}]" if request_id() else ""
        return True


def configure_logging(level: str) -> None:
    """Logs to standard error; standard output belongs to the READY line.

    DEBUG is for our own lines: those of libraries may quote what they work on, as Pillow's do with
    texts inside of images.
    """
    handler = logging.StreamHandler()
    handler.addFilter(_RequestIdFilter())
    others = "INFO" if level == "DEBUG" else level
    logging.basicConfig(level=others, format=_FORMAT, handlers=[handler])
    for name in _OURS:
        logging.getLogger(name).setLevel(level)
