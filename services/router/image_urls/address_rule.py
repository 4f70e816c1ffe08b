"""Which network addresses may be connected to: public ones, and what the operator adds."""

import ipaddress
from collections.abc import Iterable

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_IPV6_PUBLIC = ipaddress.IPv6Network("2000::/3")
#: Translates to the IPv4 address in its last four bytes.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
#: Not told apart by the standard library: addresses of machines' own clouds, relays and examples.
_NOT_PUBLIC: tuple[IpNetwork, ...] = (
    ipaddress.IPv4Network("168.63.129.16/32"),  # Azure's platform, seen from its machines
    ipaddress.IPv4Network("192.88.99.0/24"),  # 6to4 relays
    ipaddress.IPv6Network("2002::/16"),  # 6to4: any IPv4 address within
    ipaddress.IPv6Network("3fff::/20"),  # documentation
)


class AddressRule:
    """Decides by the address alone, never by a name.

    Args:
        networks: CIDR networks that are allowed though not public.
    """

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._networks = tuple(ipaddress.ip_network(network) for network in networks)

    def allows(self, text: str) -> bool:
        """Whether a connection to this address is allowed; False for what is no address."""
        try:
            address = _inner(ipaddress.ip_address(text))
        except ValueError:
            return False
        return any(address in network for network in self._networks) or _is_public(address)


def _inner(address: IpAddress) -> IpAddress:
    """The IPv4 address that an IPv6 address stands for, if it does."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(address.packed[-4:])
    return address


def _is_public(address: IpAddress) -> bool:
    if not address.is_global or address.is_multicast:
        return False
    if address.version == 6 and address not in _IPV6_PUBLIC:
        return False
    return not any(address in network for network in _NOT_PUBLIC)
