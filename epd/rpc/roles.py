"""Roles as certificates name them."""

from collections.abc import Iterable

ROUTER = "router"
ENCODER = "encoder"
PREFILL = "prefill"
DECODE = "decode"
#: People and their tools: may look at workers, and at nothing else of them.
OPERATOR = "operator"

#: A certificate names a role by a DNS name of this domain. ``.internal`` is reserved for private
#: use, so no public CA signs one.
_DOMAIN = ".epd.internal"


def role_name(role: str) -> str:
    """The DNS name of a role, as in ``decode.epd.internal``."""
    return role + _DOMAIN


def roles_of(names: Iterable[str]) -> frozenset[str]:
    """The roles among a certificate's alternative names."""
    return frozenset(name.removesuffix(_DOMAIN) for name in names if name.endswith(_DOMAIN))
