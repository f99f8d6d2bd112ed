"""Addresses outside the public network are refused, in every spelling."""

import pytest

from runtime.media.remote_image import is_public

REFUSED = """
    127.0.0.1 127.255.255.254 0.0.0.0 0.1.2.3 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1
    169.254.169.254 100.64.0.1 192.0.0.1 192.0.2.1 198.18.0.1 198.51.100.1 203.0.113.9 224.0.0.1
    239.1.2.3 240.0.0.1 255.255.255.255 192.88.99.1 192.0.0.192 168.63.129.16
    ::1 :: fe80::1 fe80::1%eth0 fc00::1 fd12::1 fec0::1 ff02::1 2001:db8::1 100::1
    ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 ::127.0.0.1 ::7f00:1
    64:ff9b::7f00:1 64:ff9b::a00:1 64:ff9b:1::a00:1 2002:7f00:1:: 2002:a00:1::
    2001:0:7f00:1:: 3fff::1 ::ffff:192.0.0.192 2002:a83f:8110::
    localhost example.org 127.1 2130706433 0x7f000001 [::1]
"""
OPEN = "8.8.8.8 1.1.1.1 93.184.216.34 2606:4700:4700::1111 2a00:1450:4001::5 ::ffff:8.8.8.8"


@pytest.mark.parametrize("address", REFUSED.split())
def test_refused(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", OPEN.split())
def test_open(address: str) -> None:
    assert is_public(address)
