"""Write docs/coverage.md from a run of every network: `python tests/networks/write_coverage.py`."""

from __future__ import annotations

import collections
import functools
import sys
import warnings
from pathlib import Path

from catalogue import NETWORKS, build, inputs

from meshpar.testing import assert_equivalent
from meshpar.testing.equivalence import Report

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
MOST = 4  # argument lists shown for an op

HEAD = """# Coverage

Every network below is written for one GPU, in plain torch (`tests/networks`), and runs unedited. The tests compare it
with one process in float64: outputs, gradients of inputs and of all parameters, buffers, state-dict keys. This page is
made by `python tests/networks/write_coverage.py` and a test keeps it true: it runs the networks and compares.

What becomes of a torch function that meets activations: **rule**, it runs sharded by a rule of ours, and sends what
the rule says; **gather**, it has no sharded way for these placements, so its inputs are replicated, it is right, and it
is said, by a warning and in the record. There is no third kind.
"""


@functools.cache
def run(name: str, mesh: str) -> Report:
    """Compare a network with one process, once."""
    network = NETWORKS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return assert_equivalent(
            functools.partial(build, name), inputs(name), mesh, layouts=network.layouts, gathers=True
        )


def page() -> str:
    """Run every network on every mesh, and put what the records say in two tables."""
    calls: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    used: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    networks: list[str] = []
    for name, network in NETWORKS.items():
        gathers: set[str] = set()
        for mesh in network.meshes:
            log = run(name, mesh).log
            gathers |= {f"{entry.op} in {entry.where or 'the root'} on {mesh}" for entry in log.gathers()}
            for (op, status), arguments in log.calls.items():
                if not op.endswith("__get__"):
                    calls[op, status] |= arguments
                    used[op, status].add(name)
        meshes = ", ".join(f"`{mesh}`" for mesh in network.meshes)
        networks.append(f"| {name} | {network.note} | {meshes} | {'; '.join(sorted(gathers)) or 'none'} |")
    lines = [HEAD, "## Networks", "", "| network | what it has | meshes | gathers |", "| --- | --- | --- | --- |"]
    lines += [*networks, "", "## Functions", "", "| function | status | arguments, as the networks give them | in |"]
    lines.append("| --- | --- | --- | --- |")
    for (op, status), arguments in sorted(calls.items()):
        told = sorted(arguments - {""}, key=lambda text: (len(text), text))
        shown = "; ".join(f"`{text}`" for text in told[:MOST]) + (f"; {len(told) - MOST} more" if told[MOST:] else "")
        lines.append(f"| `{op}` | {status} | {shown} | {', '.join(sorted(used[op, status]))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"wrote {PAGE}\n")
