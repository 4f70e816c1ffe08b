"""Small open models turned into plain Hugging Face folders, without any model hub."""

from epd.model_fetch.catalogue import CATALOGUE, FetchableModel
from epd.model_fetch.fetch import DOWNLOAD_TIMEOUT_S, default_folder, fetch, is_complete

__all__ = [
    "CATALOGUE",
    "DOWNLOAD_TIMEOUT_S",
    "FetchableModel",
    "default_folder",
    "fetch",
    "is_complete",
]
