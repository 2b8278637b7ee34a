"""The command line: `python -m meshpar doctor`, `python -m meshpar plan`, `python -m meshpar demo`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from meshpar.doctor import doctor
from meshpar.errors import MeshparError, SpecError, explain
from meshpar.planning import plan
from meshpar.simulating.demo import demo


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
    two = commands.add_parser("plan", help="print what a training step holds and sends on each rank of a mesh")
    two.add_argument("model", help="package.module:factory, a function or class that gives the model")
    two.add_argument("--input", action="append", required=True, help="shape that one data rank gives: 1,70,721,1440")
    two.add_argument("--mesh", required=True, help='such as "data=8,domain=8"')
    two.add_argument("--world", type=int, help="number of ranks; by default the product of the sizes")
    two.add_argument("--optimizer", default="adamw", help='a class of torch.optim, or "none" for inference')
    two.add_argument("--precision", help="bf16 or fp16")
    two.add_argument("--checkpoint", help="blocks or all")
    three = commands.add_parser("demo", help="train a small U-Net on processes of this machine, beside one process")
    three.add_argument("--mesh", default="data=2,domain=2", help="at most 16 ranks, such as data=1,domain=4")
    given = parser.parse_args(arguments)
    if given.command == "demo":
        return demo(given.mesh)
    if given.command == "doctor":
        return doctor(spec=given.mesh, device=given.device, timeout_s=given.timeout_s)
    try:
        print(_planned(given))
    except MeshparError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _planned(given: argparse.Namespace) -> object:
    options = {name: value for name in ("precision", "checkpoint") if (value := getattr(given, name)) is not None}
    shapes = [_shape(text) for text in given.input]
    optimizer = None if given.optimizer == "none" else given.optimizer
    return plan(_model(given.model), given.mesh, shapes, world=given.world, optimizer=optimizer, **options)


def _shape(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.replace("x", ",").split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise SpecError(explain("--input: not a shape.", got=repr(text), needs="sizes", fix="--input 1,70,721,1440"))
    return tuple(map(int, parts))


def _model(name: str) -> nn.Module:
    """Make the model that package.module:factory names, looking in the working directory, too."""
    module, colon, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(module) if module and colon else None
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError) as error:
        needs = "package.module:factory, importable from here"
        text = explain("plan: the model cannot be found.", got=[repr(name), str(error)], needs=needs, fix="see --help")
        raise SpecError(text) from error
    finally:
        sys.path.remove(os.getcwd())
    model = factory if isinstance(factory, nn.Module) else factory()
    if not isinstance(model, nn.Module):
        got, needs = f"{name} gives a {type(model).__name__}", "a torch.nn.Module"
        raise SpecError(explain("plan: not a model.", got=got, needs=needs, fix="name a function that gives the model"))
    return model


if __name__ == "__main__":
    sys.exit(main())
