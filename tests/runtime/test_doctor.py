"""`python -m meshpar doctor`: one process, two ranks, and what it says of hosts that are made up."""

import dataclasses
import runpy
import socket
import sys
from pathlib import Path

import pytest
import torch

import meshpar
from meshpar import doctor, make_mesh, runtime
from meshpar.__main__ import main
from meshpar.doctor import Facts, judge
from meshpar.testing import run_ranks

GIB = 1 << 30
FINE = Facts(
    0, "a", "torchrun", "cpu", "torch 2", "10.0.0.1", "eth0", shm_bytes=(16 * GIB, 8 * GIB), named=("10.0.0.1",)
)


def but(**changes):
    return dataclasses.replace(FINE, **changes)


def test_the_doctor_on_one_process(capsys):
    main(["doctor", "--device", "cpu"])
    said = capsys.readouterr().out
    for part in (
        "launcher    none, 1 rank",
        f"torch {torch.__version__}",
        "/dev/shm",
        "interface lo (up)",
        "all-reduce",
    ):
        assert part in said


def test_a_broken_launcher_is_said_in_words_and_by_the_code(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("WRONG")
    assert "missing in the environment: WORLD_SIZE" in said


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return str(opened.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "gpu"], "device: not known"),
        (["--device", "cpu", "--timeout-s", "0"], "timeout_s=0"),
        (["--device", "cpu", "--timeout-s", "nan"], "timeout_s=nan"),
        (["--device", "cpu", "--mesh", "domain=3"], "domain=3"),
        (["--device", "cpu", "--mesh", "rows=1"], "unknown axis"),
    ],
)
def test_arguments_that_are_none_are_said_and_not_blamed_on_the_network(arguments, says, capsys):
    assert main(["doctor", *arguments]) == 1
    said = capsys.readouterr().out
    assert said.startswith("WRONG")
    assert says in said
    assert "reach" not in said


def test_ranks_that_do_not_come_are_said(capsys, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", free_port())):
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--device", "cpu", "--timeout-s", "1"]) == 1
    assert "the ranks do not reach each other (MASTER_ADDR=127.0.0.1" in capsys.readouterr().out


def test_a_command_that_is_none_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["nurse"])
    assert "doctor" in capsys.readouterr().err


def test_the_module_is_a_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["meshpar", "doctor", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(Path(meshpar.__file__).with_name("__main__.py")), run_name="__main__")
    assert ended.value.code == 0
    assert "--mesh" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ([FINE], []),
        ([FINE, but(rank=1, host="b")], []),
        ([but(hint="start with `srun`")], ["start with `srun`"]),
        ([FINE, but(rank=1, versions="torch 3")], ["differ in their versions: torch 2; torch 3"]),
        ([but(shm_bytes=(64 << 20, 60 << 20))], ["a: /dev/shm has 60 MiB free of 64 MiB", "--shm-size"]),
        ([but(shm_bytes=(16 * GIB, 1 << 20))], ["1 MiB free of 16,384 MiB", "crashed jobs"]),
        ([but(shm_bytes=None)], ["a: no /dev/shm"]),
        ([but(num_gpus=2)], ["a: 2 GPUs, and ranks that compute on the CPU"]),
        ([but(num_gpus=2, device="cuda:0")], []),
        ([but(named=("127.0.1.1",))], []),
        ([but(named=("127.0.1.1",)), but(rank=1, host="b")], ["a: the host name resolves to 127.0.1.1", "10.0.0.1 is"]),
        ([FINE, but(rank=1, host="b", interface=None)], ["b: no interface with an address"]),
    ],
)
def test_what_is_wrong_is_said_in_words(facts, says):
    said = "\n".join(judge(facts))
    assert bool(said) is bool(says)
    assert [part for part in says if part not in said] == []


def measured():
    mesh = make_mesh("data=1,domain=2", "cpu")
    (speed,) = doctor.measure(mesh, torch.device("cpu"), num_bytes=1 << 16, repeats=2)
    with runtime.distributed(device="cpu") as process:
        report = doctor.examine(process, "domain=2")
    text = doctor.render(report)
    return speed.axis, speed.size, 0 < speed.latency_s < 60, speed.bytes_per_s > 0, "domain of 2: ring of sends" in text


def test_the_axes_of_two_ranks_are_measured():
    assert run_ranks(measured, 2) == [("domain", 2, True, True, True)] * 2
