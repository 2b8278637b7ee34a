"""The command line: `python -m meshpar doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from meshpar.doctor import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and give the code of the process.

    Args:
        arguments: in place of those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m meshpar")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("doctor", help="print what this job found, try its communication, say what is wrong")
    one.add_argument("--mesh", default="", help='axes to measure, such as "data=2,domain=4"; by default all on data')
    one.add_argument("--device", help="cpu or cuda; by default cuda where there is one")
    one.add_argument("--timeout-s", type=float, default=60.0, help="seconds to wait for other ranks")
    given = parser.parse_args(arguments)
    return doctor(spec=given.mesh, device=given.device, timeout_s=given.timeout_s)


if __name__ == "__main__":
    sys.exit(main())
