"""`python -m meshpar plan`: a table, or an error in words and by the code."""

from __future__ import annotations

import pytest
from torch import nn

from meshpar.__main__ import main

MODEL = nn.Conv2d(2, 3, 3, padding=1)


def small() -> nn.Module:
    return nn.Conv2d(2, 3, 3, padding=1)


def number() -> int:
    return 3


@pytest.mark.parametrize("name", ["small", "MODEL"])
def test_the_command_prints_the_plan(capsys, name):
    arguments = ["plan", f"test_command:{name}", "--input", "1,2,721x16", "--mesh", "data=2,domain=2"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "on 4 ranks" in said
    assert "halo" in said
    assert main([*arguments, "--optimizer", "none", "--precision", "bf16"]) == 0
    assert "reduce-scatter" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "shape", "mesh", "says"),
    [
        ("test_command", "1,2,8,8", "data=2", "package.module:factory"),
        ("no_such_module:f", "1,2,8,8", "data=2", "no_such_module"),
        ("test_command:nothing", "1,2,8,8", "data=2", "nothing"),
        ("test_command:number", "1,2,8,8", "data=2", "gives a int"),
        ("test_command:small", "1,2,eight", "data=2", "eight"),
        ("test_command:small", "", "data=2", "not a shape"),
        ("test_command:small", "1,2,8,8", "data=0", "data=0"),
        ("test_command:small", "1,2,8,8", "rows=2", "rows"),
    ],
)
def test_what_cannot_be_planned_is_said(capsys, name, shape, mesh, says):
    assert main(["plan", name, "--input", shape, "--mesh", mesh]) == 2
    assert says in capsys.readouterr().err
