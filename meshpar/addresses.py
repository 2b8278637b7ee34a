"""Addresses of this host: one that other hosts can reach, and the interface that owns it.

Invariant: nothing is sent to find out, and what the user has set is checked, never replaced.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass

import psutil

from meshpar.errors import SpecError, explain

GLOO = "GLOO_SOCKET_IFNAME"
"""The variable by which gloo is told its interfaces, names with commas between."""

PREFERRED = ("hsn", "ib", "en")
"""How the names of fast interfaces begin, best first: Slingshot, InfiniBand, then any Ethernet with a name of place."""

VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "podman", "flannel", "cali", "lxc", "lxd")
"""How the names of interfaces begin that lead to containers of this host, and to no other host."""

_ABROAD = ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888"))


@dataclass(frozen=True)
class Interface:
    """Hold one network interface.

    Args:
        name: as the system calls it.
        up: whether it is switched on.
        addresses: its IPv4 and IPv6 addresses, IPv4 first; may be none.
    """

    name: str
    up: bool
    addresses: tuple[str, ...]

    def routable(self) -> tuple[str, ...]:
        """Give the addresses by which another host may reach this one: none where it is down, or virtual."""
        if not self.up or self.name.startswith(VIRTUAL):
            return ()
        return tuple(address for address in self.addresses if _reaches_out(address))


def interfaces() -> list[Interface]:
    """List the interfaces of this host, those that are likely to be fast first."""
    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        by_family = [
            str(entry.address).partition("%")[0]
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in entries
            if entry.family == family
        ]
        found.append(Interface(name, name in stats and bool(stats[name].isup), tuple(by_family)))
    return sorted(found, key=lambda interface: (_preference(interface.name), interface.name))


def _preference(name: str) -> int:
    return next((place for place, start in enumerate(PREFERRED) if name.startswith(start)), len(PREFERRED))


def _reaches_out(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified or parsed.is_multicast)


def resolve_master_addr() -> str:
    """Give an address at which other hosts can reach this one.

    The first that this host owns, on an interface that is up and no container's, of: what the host name resolves to;
    the source address that the kernel picks for a UDP socket (nothing is sent); the addresses of the interfaces,
    `PREFERRED` names first. IPv4 goes before IPv6 each time. Else 127.0.0.1.

    Example:
        >>> import ipaddress
        >>> ipaddress.ip_address(resolve_master_addr()).is_unspecified
        False
    """
    owned = [address for interface in interfaces() for address in interface.routable()]
    owned.sort(key=lambda address: ":" in address)  # the order of the interfaces stays
    named = _addresses_of(socket.gethostname())
    probed = [source for family, target in _ABROAD if (source := _source_towards(family, target))]
    return next((address for address in [*named, *probed, *owned] if address in owned), "127.0.0.1")


def reachable_address() -> str:
    """Give an address of this host for other ranks, without resolving a name: of gloo's interface where one is set.

    Else the first of the interfaces, `PREFERRED` names first, IPv4 before IPv6; else 127.0.0.1.
    """
    known = {interface.name: interface for interface in interfaces()}
    chosen = [known[name] for name in os.environ.get(GLOO, "").split(",") if name in known]
    given = [address for interface in chosen for address in interface.addresses if not _is_local_to_link(address)]
    owned = [address for interface in known.values() for address in interface.routable()]
    return next(iter([*sorted(given, key=_is_v6), *sorted(owned, key=_is_v6)]), "127.0.0.1")


def _is_v6(address: str) -> bool:
    return ":" in address


def _is_local_to_link(address: str) -> bool:
    return ipaddress.ip_address(address).is_link_local


def _addresses_of(host: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    found = [(family, str(where[0]).partition("%")[0]) for family, _, _, _, where in entries]
    return [a for f, a in found if f == socket.AF_INET] + [a for f, a in found if f == socket.AF_INET6]


def _source_towards(family: socket.AddressFamily, target: str) -> str | None:
    """Give the address from which the kernel would send to a target; None without a route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return None


def resolve_socket_ifname() -> str | None:
    """Give the interface over which this host talks to the others, None where none leads to another host.

    The one towards MASTER_ADDR, where that is set and is not a loopback address; else the one that owns
    `resolve_master_addr()`.
    """
    owners = {address: interface.name for interface in interfaces() for address in interface.routable()}
    for target in _addresses_of(os.environ.get("MASTER_ADDR") or "localhost"):
        if _reaches_out(target):
            family = socket.AF_INET6 if ":" in target else socket.AF_INET
            source = target if target in owners else _source_towards(family, target)
            if source in owners:
                return owners[source]
    return owners.get(resolve_master_addr())


def configure_gloo_ifname() -> str | None:
    """Set GLOO_SOCKET_IFNAME where it is unset and an interface is found; check it where it is set.

    NCCL_SOCKET_IFNAME is never touched: NCCL chooses well by itself, and reads "^lo" where gloo does not.

    Returns:
        The value of the variable, None where it stays unset.

    Raises:
        SpecError: GLOO_SOCKET_IFNAME names no interface of this host, or one that is down or has no address.
    """
    given = os.environ.get(GLOO)
    if given:
        check_gloo_ifname(given)
        return given
    name = resolve_socket_ifname()
    if name is not None:
        os.environ[GLOO] = name
    return name


def check_gloo_ifname(given: str) -> None:
    """Check names of interfaces, with commas between, against those of this host.

    Raises:
        SpecError: one is not an interface of this host, is down, or has no address.
    """
    known = {interface.name: interface for interface in interfaces()}
    wrong = [f"{name!r} in {GLOO}={given!r}: {why}" for name in given.split(",") if (why := _unusable(name, known))]
    if wrong:
        usable = [name for name in known if not _unusable(name, known)]
        first = next((name for name in usable if known[name].routable()), (usable or ["lo"])[0])
        raise SpecError(
            explain(
                "gloo: cannot use the interface.",
                got=wrong,
                needs=f"names out of {', '.join(usable) or 'none that is up'} on {socket.gethostname()}",
                fix=f"{GLOO}={first}, or leave it unset",
            )
        )


def _unusable(name: str, known: dict[str, Interface]) -> str | None:
    if name in known:
        interface = known[name]
        return "it is down" if not interface.up else None if interface.addresses else "it has no address"
    if name.startswith("^"):
        return "gloo leaves nothing out, that is how NCCL is told"
    owner = next((interface.name for interface in known.values() if name in interface.addresses), None)
    if owner is not None:
        return f"an address, not a name; the interface is {owner}"
    return "no such interface"
