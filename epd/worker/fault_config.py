"""Test-only settings that make transfers go wrong."""

from dataclasses import dataclass

from epd.config import ConfigError, option
from epd.errors import InvalidRequestError
from epd.transfer.faults import Faults, parse_faults


@dataclass(frozen=True)
class FaultConfig:
    """Nothing of this belongs into service: requests fail, and without checksums answers differ."""

    faults: tuple[str, ...] = option(
        (),
        help="test only, refused without --allow-faults: transfers to spoil, such as "
        "fail_post@3,drop_notice%0.5,late%1:2.5,seed=7 (epd/transfer/faults.py has the kinds)",
    )
    allow_faults: bool = option(False, help="test only: take --faults for what it is")

    def parsed(self) -> Faults | None:
        """The faults to force; None when there are none.

        Raises:
            ConfigError: an item is none, or faults are not allowed.
        """
        if not self.faults:
            return None
        if not self.allow_faults:
            raise ConfigError("--faults spoils requests on purpose and needs --allow-faults")
        try:
            return parse_faults(self.faults)
        except InvalidRequestError as error:
            raise ConfigError(str(error)) from error
