"""Two hosts on one machine: namespaces of network, names, mounts and processes, joined by a cable.

A host ends with its first process, which reads a pipe until nobody holds the other end: so it ends with this process,
however that ends. Nothing of it has a name outside of it: no network namespace in /run/netns, no interface, no file.
Each host has the name `node1` or `node2`, which it resolves to 127.0.1.1 itself, as Debian does; `eth0` to the other;
`docker0` with the same address on both; and `enp9s0`, which is up without an address. `node1` has no default route, and
that of `node2` leads into `docker0`.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ADDRESSES = {"node1": "10.77.3.1", "node2": "10.77.3.2"}
NAMESPACES = ("--net", "--uts", "--mount", "--pid")

SET_UP = """
set -e
hostname {name}
mount --bind {folder}/{name}.hosts /etc/hosts
mount --bind {folder}/empty /etc/resolv.conf
mount --bind {folder}/{name}.boot_id /proc/sys/kernel/random/boot_id
mount -t tmpfs -o size=256m tmpfs /dev/shm
ip link set lo up
ip link add docker0 type bridge
ip link add veth0 type veth peer name inside
ip link set veth0 master docker0
ip link set veth0 up
ip link set inside up
ip addr add 172.17.0.1/16 dev docker0
ip link set docker0 up
echo ready
exec cat
"""


@dataclass
class Host:
    """Hold a host: its name and address, and the process that it ends with."""

    name: str
    address: str
    first: subprocess.Popen

    @property
    def pid(self):
        """Give the first process inside, as this process sees it."""
        (inside,) = psutil.Process(self.first.pid).children()
        return inside.pid

    def command(self, *command):
        """Give the command that runs a command on the host."""
        return ["nsenter", f"--target={self.pid}", *NAMESPACES, "--", *command]

    def start(self, *command, env):
        """Start a command on the host."""
        pipe = subprocess.PIPE
        return subprocess.Popen(self.command(*command), env=env, stdout=pipe, stderr=pipe, text=True)

    def run(self, *command):
        """Run a short command on the host, which must succeed, and give what it printed."""
        done = subprocess.run(self.command(*command), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command} on {self.name}: {done.stderr}"
        return done.stdout


def check_tools():
    """Say what is missing here: it is a failure and no skip, since CI has it all."""
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    assert not missing, f"two hosts need {missing}: apt-get install iproute2 util-linux mount"
    assert os.geteuid() == 0, "two hosts need root, to make namespaces"


@contextlib.contextmanager
def two_hosts(folder):
    """Make two hosts that share all files; they are gone after the block.

    Args:
        folder: for a few small files, of this call alone.
    """
    check_tools()
    folder = Path(folder)
    (folder / "empty").write_text("")
    hosts = []
    with contextlib.ExitStack() as stack:
        for name, address in ADDRESSES.items():
            others = [f"{there} {other}\n" for other, there in ADDRESSES.items() if other != name]
            (folder / f"{name}.hosts").write_text("".join(["127.0.0.1 localhost\n", f"127.0.1.1 {name}\n", *others]))
            (folder / f"{name}.boot_id").write_text(f"00000000-0000-4000-8000-00000000000{name[-1]}\n")
            script = SET_UP.format(name=name, folder=folder)
            command = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "--propagation=private", "--kill-child"]
            first = subprocess.Popen(
                [*command, "sh", "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(end, first)
            assert first.stdout.readline() == "ready\n", first.communicate(timeout=60)
            hosts.append(Host(name, address, first))
        one, two = hosts
        for cable in ("eth0", "enp9s0"):
            ends = [cable, "netns", str(one.pid), "type", "veth", "peer", "name", cable, "netns", str(two.pid)]
            subprocess.run(["ip", "link", "add", *ends], check=True, timeout=60)
        for host in hosts:
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "enp9s0", "addrgenmode", "none")
            host.run("ip", "link", "set", "eth0", "up")
            host.run("ip", "link", "set", "enp9s0", "up")
        two.run("ip", "route", "add", "default", "via", "172.17.0.2", "dev", "docker0")
        yield one, two


def end(first):
    """End a host and everything that runs on it."""
    inside = psutil.Process(first.pid).children() if first.poll() is None else []
    first.stdin.close()
    try:
        first.wait(timeout=10)
    except subprocess.TimeoutExpired:
        first.kill()
        first.wait()
    for pipe in (first.stdout, first.stderr):
        pipe.close()
    psutil.wait_procs(inside, timeout=10)


def main():
    """Make two hosts, say which processes and which interfaces they have, and wait to be killed."""
    with two_hosts(sys.argv[1]) as hosts:
        sleepers = [host.start("sleep", "1000", env=dict(os.environ)) for host in hosts]
        deadline = time.monotonic() + 60
        inside = [psutil.Process(sleeper.pid) for sleeper in sleepers]
        while not all(process.children() for process in inside) and time.monotonic() < deadline:
            time.sleep(0.02)
        tree = psutil.Process().children(recursive=True)
        print(" ".join(str(process.pid) for process in tree), flush=True)
        time.sleep(1000)


if __name__ == "__main__":
    main()
