"""Addresses and interfaces of hosts that are made up: sockets and psutil answer from a table."""

import os
import socket
from types import SimpleNamespace

import pytest

from meshpar import addresses, runtime
from meshpar.errors import SpecError

LO = {"lo": ["127.0.0.1", "::1"]}
PLAIN = {**LO, "eth0": ["10.0.0.5", "fe80::1%eth0"]}


@pytest.fixture
def host(monkeypatch):
    """Make up a host: interfaces, what its name resolves to, and the source address towards each target."""
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that what the code sets is taken back
        monkeypatch.delenv(name)

    def make(nets, names=(), routes=None, down=(), resolves=None):
        def family(address):
            return socket.AF_INET6 if ":" in address else socket.AF_INET

        def getaddrinfo(name, *args, **kwargs):
            found = {"here": names, "localhost": ["127.0.0.1"], **(resolves or {})}.get(name)
            if found is None:
                raise socket.gaierror("unknown")
            return [(family(a), socket.SOCK_STREAM, 6, "", (a, 0)) for a in found]

        entries = {n: [SimpleNamespace(family=family(a), address=a) for a in found] for n, found in nets.items()}
        monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: entries)
        stats = {n: SimpleNamespace(isup=n not in down) for n in nets}
        monkeypatch.setattr(addresses.psutil, "net_if_stats", lambda: stats)
        monkeypatch.setattr(addresses.socket, "gethostname", lambda: "here")
        monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(addresses, "_source_towards", lambda family, target: (routes or {}).get(target))

    return make


OUT = {"8.8.8.8": "10.0.0.5"}


@pytest.mark.parametrize(
    ("nets", "names", "routes", "down", "address", "interface"),
    [
        pytest.param(PLAIN, ["10.0.0.5"], {}, (), "10.0.0.5", "eth0", id="host name"),
        pytest.param(PLAIN, ["127.0.1.1"], OUT, (), "10.0.0.5", "eth0", id="field 45: name is a loopback"),
        pytest.param(PLAIN, ["127.0.0.1"], {}, (), "10.0.0.5", "eth0", id="field 47: no default route"),
        pytest.param(PLAIN, None, OUT, (), "10.0.0.5", "eth0", id="name unknown"),
        pytest.param(PLAIN, ["10.9.9.9"], OUT, (), "10.0.0.5", "eth0", id="name of another host"),
        pytest.param(
            {**PLAIN, "docker0": ["172.17.0.1"], "veth1": ["10.1.0.1"], "br-0": ["10.2.0.1"]},
            ["172.17.0.1"],
            {"8.8.8.8": "172.17.0.1"},
            (),
            "10.0.0.5",
            "eth0",
            id="field 47: never docker or veth",
        ),
        pytest.param(
            {**PLAIN, "enp1s0": ["10.0.1.5"], "ib0": ["10.0.2.5"], "hsn0": ["10.0.3.5"]},
            ["127.0.1.1"],
            {},
            (),
            "10.0.3.5",
            "hsn0",
            id="field 47: hsn first",
        ),
        pytest.param(
            {**PLAIN, "enp1s0": ["10.0.1.5"], "ib0": ["10.0.2.5"]}, [], {}, (), "10.0.2.5", "ib0", id="then ib"
        ),
        pytest.param(
            {**PLAIN, "enp1s0": ["10.0.1.5"], "ib0": ["10.0.2.5"]}, [], {}, ("ib0",), "10.0.1.5", "enp1s0", id="ib down"
        ),
        pytest.param({**PLAIN, "ib0": []}, [], {}, (), "10.0.0.5", "eth0", id="up without an address"),
        pytest.param({**PLAIN, "ib0": ["fe80::2%ib0"]}, [], {}, (), "10.0.0.5", "eth0", id="link-local alone"),
        pytest.param({**PLAIN, "ib0": ["169.254.3.4"]}, [], {}, (), "10.0.0.5", "eth0", id="link-local of IPv4"),
        pytest.param({**LO, "eth0": ["fd00::5", "fe80::1"]}, ["::1"], {}, (), "fd00::5", "eth0", id="IPv6 only"),
        pytest.param(
            {**LO, "eth0": ["fd00::5"], "eth1": ["fd01::5"]},
            [],
            {"2001:4860:4860::8888": "fd01::5"},
            (),
            "fd01::5",
            "eth1",
            id="IPv6 by route",
        ),
        pytest.param({**LO, "ib0": ["fd00::5"], "eth0": ["10.0.0.5"]}, [], {}, (), "10.0.0.5", "eth0", id="IPv4 first"),
        pytest.param(LO, ["127.0.0.1"], {}, (), "127.0.0.1", None, id="no network"),
    ],
)
def test_the_address_and_its_interface(host, nets, names, routes, down, address, interface):
    host(nets, names, routes, down)
    assert runtime.resolve_master_addr() == address
    assert runtime.resolve_socket_ifname() == interface
    assert runtime.configure_gloo_ifname() == interface
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
    assert "NCCL_SOCKET_IFNAME" not in os.environ


TWO = {**LO, "eth0": ["10.0.0.5"], "eth1": ["10.0.1.5"]}


@pytest.mark.parametrize(
    ("master", "interface"),
    [("10.0.1.9", "eth1"), ("10.0.1.5", "eth1"), ("far", "eth1"), ("127.0.0.1", "eth0"), ("nobody", "eth0")],
)
def test_the_interface_is_the_one_towards_the_master(host, monkeypatch, master, interface):
    """A host with two networks, no default route, and the other hosts on the second."""
    resolves = {"far": ["10.0.1.9"], **{a: [a] for a in ("10.0.1.9", "10.0.1.5", "127.0.0.1")}}
    host(TWO, ["127.0.1.1"], {"10.0.1.9": "10.0.1.5"}, resolves=resolves)
    monkeypatch.setenv("MASTER_ADDR", master)
    assert runtime.resolve_socket_ifname() == interface


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("^lo", "gloo leaves nothing out"),
        ("10.0.0.5", "an address, not a name; the interface is eth0"),
        ("eth7", "no such interface"),
        ("eth0,eth7", "'eth7'"),
        ("ib0", "it has no address"),
        ("eth1", "it is down"),
        ("eth0, lo", "' lo'"),
    ],
)
def test_field_46_a_given_interface_is_checked(host, monkeypatch, given, says):
    host({**TWO, "ib0": []}, down=("eth1",))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    with pytest.raises(SpecError) as caught:
        runtime.configure_gloo_ifname()
    assert says in str(caught.value)
    assert "GLOO_SOCKET_IFNAME=eth0, or leave it unset" in str(caught.value)
    assert os.environ["GLOO_SOCKET_IFNAME"] == given


@pytest.mark.parametrize("given", ["eth0", "eth1,eth0", "lo"])
def test_a_given_interface_that_is_there_stays(host, monkeypatch, given):
    host(TWO)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    assert runtime.configure_gloo_ifname() == given


def test_this_host_answers():
    """Without anything made up: sockets and psutil of the machine."""
    owned = [a for interface in addresses.interfaces() for a in interface.addresses]
    assert runtime.resolve_master_addr() in [*owned, "127.0.0.1"]
    assert addresses._source_towards(socket.AF_INET, "127.0.0.1") == "127.0.0.1"
    assert addresses._source_towards(socket.AF_INET, "no address") is None
