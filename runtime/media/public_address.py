"""Which addresses a server may connect to on behalf of a client: those that all the world has."""

from __future__ import annotations

import ipaddress

# Networks in which an IPv6 address stands for the IPv4 address in its last 32 bits.
_HOLD_IPV4 = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")))
# Lead to nothing outside: benchmarks, the anycast of relays; and where clouds tell their machines
# secrets: in the network of protocols (Oracle's), at an address of Azure's that looks like others.
_REFUSED_IPV4 = tuple(
    map(
        ipaddress.IPv4Network,
        ("198.18.0.0/15", "192.88.99.0/24", "192.0.0.0/24", "168.63.129.16/32"),
    )
)
# Documentation, since 2024: not every Python knows it.
_REFUSED_IPV6 = ipaddress.IPv6Network("3fff::/20")
_LOW_32_BITS = 2**32 - 1


def is_public(text: str) -> bool:
    """Whether an IP address is one of the open network, and leads to no other one in disguise."""
    try:
        # A zone names an interface of this machine.
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return _is_public_ipv4(address)
    if address.scope_id is not None:
        return False
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in _HOLD_IPV4):
        inner.append(ipaddress.IPv4Address(int(address) & _LOW_32_BITS))
    if any(each is not None and not _is_public_ipv4(each) for each in inner):
        return False
    if address.ipv4_mapped is not None:
        return True
    return _is_open(address) and not address.is_site_local and address not in _REFUSED_IPV6


def _is_public_ipv4(address: ipaddress.IPv4Address) -> bool:
    return _is_open(address) and not any(address in network for network in _REFUSED_IPV4)


def _is_open(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not address.is_unspecified
        and not address.is_loopback
        and not address.is_link_local
    )
