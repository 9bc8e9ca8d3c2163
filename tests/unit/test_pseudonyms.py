"""What replaces names and addresses in a recorded machine keeps what ndpy decides by, and nothing else."""

from __future__ import annotations

import ipaddress
import itertools

import pytest

from ndpy.tools.doctor.pseudonyms import Pseudonyms

IPV4 = [
    "10.1.2.3",
    "10.1.2.77",
    "10.1.9.3",
    "10.200.0.1",
    "172.20.3.4",
    "192.168.7.8",
    "8.8.4.4",
    "8.8.8.8",
    "131.107.5.77",
    "169.254.3.4",
]
IPV6 = [
    "2620:1ec:8f8:7::4d",
    "2620:1ec:8f8:7::4e",
    "2620:1ec:8f8:8::1",
    "2a00:1450::1",
    "fd9e:21a7:a92c:2323::1",
    "fd9e:21a7:a92c:9::1",
    "fe80::526b:4bff:fec0:ffee",
]


def common_bits(one: str, other: str, size: int) -> int:
    return size - (int(ipaddress.ip_address(one)) ^ int(ipaddress.ip_address(other))).bit_length()


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations([*IPV4[:6], *IPV4[9:]], 2)))
def test_private_addresses_share_as_many_bits_as_before(one, other):
    replace = Pseudonyms()
    assert common_bits(replace.address(one), replace.address(other), 32) == common_bits(one, other, 32)


def test_public_addresses_of_a_subnet_stay_in_one():
    replace = Pseudonyms()
    near, far = (
        common_bits(replace.address("8.8.4.4"), replace.address(other), 32) for other in ("8.8.8.8", "131.107.5.77")
    )
    assert near == common_bits("8.8.4.4", "8.8.8.8", 32)
    assert far < 8


@pytest.mark.parametrize("text", [*IPV4, *IPV6])
def test_an_address_stays_of_its_kind_and_is_another(text):
    made = ipaddress.ip_address(Pseudonyms().address(text))
    before = ipaddress.ip_address(text)
    for kind in ("is_link_local", "is_loopback", "is_multicast", "is_unspecified", "version"):
        assert getattr(made, kind) == getattr(before, kind)
    if before.version == 6 and not before.is_link_local:
        assert int(made) >> 64 != int(before) >> 64


@pytest.mark.parametrize("text", ["127.0.0.1", "0.0.0.0", "224.0.0.1", "::1", "::", "ff02::1"])
def test_an_address_that_everybody_has_stays(text):
    assert Pseudonyms().address(text) == text


def test_the_same_is_always_replaced_the_same_way():
    replace = Pseudonyms()
    for text in (*IPV4, *IPV6):
        assert replace.address(text) == replace.address(text)
    assert replace.interface("lab") == replace.interface("lab") != replace.interface("other")


def test_two_records_have_nothing_in_common():
    # Two of 2**24 keys are the same now and then. Eight are not.
    assert len({Pseudonyms().address("10.1.2.3") for _ in range(8)}) > 1


def test_no_interface_gets_the_address_of_its_network_or_a_broadcast():
    own = [ipaddress.IPv4Interface(f"10.0.{place}.{5 + place}/29") for place in range(12)]
    replace = Pseudonyms(own)
    for entry in own:
        network = ipaddress.IPv4Interface(f"{replace.ipv4(entry.ip)}/29").network
        assert replace.ipv4(entry.ip) not in (network[0], network[-1])


def test_what_is_made_of_a_hardware_address_is_made_of_its_pseudonym():
    replace = Pseudonyms()
    hardware = bytes.fromhex("506b4bc0ffee")
    made = replace.hardware(hardware)
    assert made != hardware
    eui = bytes([made[0] ^ 2]) + made[1:3] + b"\xff\xfe" + made[3:]
    assert ipaddress.IPv6Address(replace.address("fe80::526b:4bff:fec0:ffee")).packed == b"\xfe\x80" + bytes(6) + eui
    assert replace.gid(hardware + bytes(10), iwarp=True) == made + bytes(10)
    assert replace.hardware(bytes(6)) == bytes(6)


def test_the_hardware_address_of_ipoib_ends_with_the_gid():
    replace = Pseudonyms()
    gid = bytes.fromhex("fe80000000000000506b4b0300c0ffee")
    assert replace.hardware(bytes.fromhex("80000208") + gid) == b"\x80\0\0\0" + replace.gid(gid)


def test_a_gid_of_an_ipv4_address_is_that_of_its_pseudonym():
    replace = Pseudonyms()
    value = ipaddress.IPv6Address("::ffff:10.1.2.3").packed
    assert ipaddress.IPv6Address(replace.gid(value)).ipv4_mapped == ipaddress.IPv4Address(replace.address("10.1.2.3"))


@pytest.mark.parametrize(
    "name",
    [
        "lo",
        "eth0",
        "eth12.100",
        "ib0",
        "ib0.8001",
        "bond1",
        "br0",
        "ens1f0np0",
        "enp24s0f1",
        "enP30832s1",
        "ibp26s0",
        "eno1",
    ],
)
def test_an_interfaces_usual_name_stays(name):
    assert Pseudonyms().interface(name) == name


@pytest.mark.parametrize("name", ["enx001b21abcdef", "acme", "eth0acme", "vethab12cd", "cali01234567890"])
def test_other_names_of_interfaces_go(name):
    assert Pseudonyms().interface(name) == "net1"
    assert Pseudonyms().interface(f"{name}.100") == "net1.100"
    assert Pseudonyms().interface(f"{name}.acme") == "net1.x"


@pytest.mark.parametrize(
    "name", ["mlx5_0", "mlx5_bond_0", "bnxt_re1", "rocep24s0f0", "rdmap16s27", "ibp129s0", "iwp24s0f0", "rxe0", "hns_3"]
)
def test_a_devices_usual_name_stays(name):
    assert Pseudonyms().device(name) == name


@pytest.mark.parametrize("name", ["acme_rail0", "rocex506b4bc0ffee", "mlx5_acme"])
def test_other_names_of_devices_go(name):
    assert Pseudonyms().device(name) == "device1"
