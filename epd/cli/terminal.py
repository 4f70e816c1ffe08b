"""The console that commands print to."""

from rich.console import Console

PLAIN_WIDTH = 140


def make_console() -> Console:
    """As wide as the terminal; :data:`PLAIN_WIDTH` where there is none, as in a log or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)
