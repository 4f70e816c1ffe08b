"""Which transfers are made to go wrong. For tests only: a worker that has these may lose requests.

A description is a list of items, each naming a kind:

* ``fail_post@3``: the third WRITE of the process;
* ``fail_post%0.5``: half a percent of them, drawn at random;
* ``late@7:2.5``, ``late%1:2.5``: kinds that take seconds;
* ``rate=5e6``: WRITEs go over a wire of so many bytes per second, one after another;
* ``seed=11``: where the random draws begin.
"""

import logging
import math
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from epd.errors import InvalidRequestError

log = logging.getLogger(__name__)

#: Kinds and whether they take seconds.
KINDS = {
    "fail_post": False,
    "fail_running": False,
    "drop_notice": False,
    "corrupt": False,
    "delay": True,
    "late": True,
    "fail_read": False,
    "delay_read": True,
}
_ITEM = re.compile(
    r"(?P<kind>[a-z_]+)(?P<how>[@%])(?P<number>\d+(\.\d+)?)(:(?P<seconds>\d+(\.\d+)?))?"
)


@dataclass(frozen=True)
class Chance:
    """``share`` of the transfers, 0 to 1; ``seconds`` where the kind takes some."""

    share: float
    seconds: float = 0.0


@dataclass
class Faults:
    """WRITEs and READs are counted from 1, each for themselves, over the backend's life.

    * ``fail_post``: WRITEs that cannot be posted;
    * ``fail_running``: WRITEs that end as failed after they were posted;
    * ``delay``: seconds a WRITE seems to run while its data is there already;
    * ``late``: seconds until a WRITE is really posted, its lease no longer looked at;
    * ``drop_notice``: WRITEs whose notice never arrives;
    * ``corrupt``: WRITEs whose first bytes arrive changed;
    * ``fail_read``: READs that cannot be posted;
    * ``delay_read``: seconds a READ seems to run;
    * ``rate``: bytes per second of all WRITEs together, 0 for no bound; each is really posted when
      such a wire would have delivered it;
    * ``die``: an exception that ends the agent thread at its next poll;
    * ``chances``: the same kinds at random.
    """

    fail_post: set[int] = field(default_factory=set)
    fail_running: set[int] = field(default_factory=set)
    delay: dict[int, float] = field(default_factory=dict)
    late: dict[int, float] = field(default_factory=dict)
    drop_notice: set[int] = field(default_factory=set)
    corrupt: set[int] = field(default_factory=set)
    fail_read: set[int] = field(default_factory=set)
    delay_read: dict[int, float] = field(default_factory=dict)
    rate: float = 0.0
    die: Exception | None = None
    chances: dict[str, Chance] = field(default_factory=dict)
    source: random.Random = field(default_factory=lambda: random.Random(0))
    writes: int = 0
    reads: int = 0
    #: Monotonic time at which the wire of ``rate`` has delivered everything.
    wire_free_at: float = 0.0
    #: What has been done, by kind.
    done: Counter[str] = field(default_factory=Counter)

    def strikes(self, kind: str, number: int) -> bool:
        """Whether a transfer goes wrong in this way; noted and logged when it does."""
        named = getattr(self, kind)
        chance = self.chances.get(kind)
        struck = number in named or (chance is not None and self.source.random() < chance.share)
        if struck:
            self.done[kind] += 1
            log.warning("forced fault %s at transfer %d", kind, number)
        return struck

    def seconds(self, kind: str, number: int) -> float:
        """For how long a transfer is held up in this way; 0 when it is not."""
        if not self.strikes(kind, number):
            return 0.0
        named: dict[int, float] = getattr(self, kind)
        return named[number] if number in named else self.chances[kind].seconds

    def wire_s(self, byte_count: int) -> float:
        """Seconds until a WRITE that is handed over now has crossed the wire of ``rate``."""
        if not self.rate:
            return 0.0
        now = time.monotonic()
        self.wire_free_at = max(now, self.wire_free_at) + byte_count / self.rate
        return self.wire_free_at - now


def parse_faults(items: Sequence[str]) -> Faults:
    """Reads a description.

    Raises:
        InvalidRequestError: an item is none, or of an unknown kind.
    """
    faults = Faults()
    for item in items:
        if item.startswith("seed="):
            faults.source = random.Random(item.removeprefix("seed="))
            continue
        if item.startswith("rate="):
            faults.rate = _rate(item.removeprefix("rate="))
            continue
        found = _ITEM.fullmatch(item)
        if found is None or found["kind"] not in KINDS:
            known = ", ".join(KINDS)
            raise InvalidRequestError(
                f"{item!r} is no fault: a kind, then @N (the Nth) or %P (percent); kinds: {known}",
                field="faults",
            )
        kind, number, seconds = found["kind"], float(found["number"]), found["seconds"]
        if KINDS[kind] != (seconds is not None):
            what = "needs" if KINDS[kind] else "takes no"
            raise InvalidRequestError(f"{item!r}: {kind} {what} :seconds", field="faults")
        if found["how"] == "%":
            faults.chances[kind] = Chance(number / 100, float(seconds or 0))
        elif KINDS[kind]:
            getattr(faults, kind)[int(number)] = float(seconds)
        else:
            getattr(faults, kind).add(int(number))
    return faults


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < math.inf:
        raise InvalidRequestError(f"{text!r} is no number of bytes per second", field="faults")
    return rate
