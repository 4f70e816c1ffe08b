"""The ``epd`` command."""

import sys

import typer

from epd.cli.chat import chat
from epd.cli.demo import demo
from epd.cli.model import app as model_app
from epd.cli.status import status
from epd.cli.trace import trace
from epd.cli.up import up
from epd.config import ConfigError
from epd.errors import EpdError
from epd.fleet.process import FleetError

app = typer.Typer(
    help="Multimodal LLM serving as four gRPC services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, up, status, chat, trace):
    app.command()(command)
app.add_typer(model_app, name="model")


def main() -> None:
    """Entry point: an expected failure is one line on standard error and exit status 1."""
    try:
        app()
    except (FleetError, ConfigError, EpdError, OSError) as error:
        print(f"epd: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
