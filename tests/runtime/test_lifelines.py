"""Who is still there: lines of processes that live, are stopped, or are gone; and the error that says so."""

import contextlib
import os
import resource
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist

import meshpar
from meshpar import lifelines, peers
from meshpar.testing import mesh_for, run_ranks


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return opened.getsockname()[1]


def test_a_line_says_here_gone_or_nothing():
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as opened:
        with socket.create_server(("127.0.0.1", 0), backlog=1) as full, contextlib.ExitStack() as stack:
            for _ in range(8):  # no more connections fit: the kernel does not answer to a further one
                waiting = stack.enter_context(socket.socket())
                waiting.settimeout(0.0)
                waiting.connect_ex(full.getsockname())
            places = {3: opened.getsockname(), 5: ("127.0.0.1", closed_port()), 8: full.getsockname()}
            start = time.monotonic()
            assert lifelines.asked(places, wait_s=0.2) == {"here": [3], "gone": [5], "silent": [8]}
            assert time.monotonic() - start < 30
        several = {rank: opened.getsockname() if rank % 2 else ("127.0.0.1", closed_port()) for rank in range(300)}
        found = lifelines.asked(several, wait_s=30)
    assert found == {"here": list(range(1, 300, 2)), "gone": list(range(0, 300, 2)), "silent": []}


def test_a_process_that_goes_right_after_it_answered_is_gone(monkeypatch):
    opened, meaning = socket.create_server(("127.0.0.1", 0)), lifelines._meaning

    def late(line, code):
        opened.close()  # resets the connection that nobody accepted
        return meaning(line, code)

    place = opened.getsockname()
    monkeypatch.setattr(lifelines, "_meaning", late)
    assert lifelines.asked({7: place}, wait_s=30) == {"here": [], "gone": [7], "silent": []}


def test_without_sockets_left_nothing_is_said():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as opened:
        place = opened.getsockname()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            found = lifelines.asked({7: place}, wait_s=1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == {"here": [], "gone": [], "silent": []}


def test_a_line_lives_as_long_as_its_process_and_is_not_inherited():
    """A worker of a data loader, which a killed rank leaves behind, must not answer for it."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writes, lifelines.own_line().encode().ljust(64))
            if os.fork() == 0:
                os.write(writes, b"forked")
            time.sleep(60)
        finally:
            os._exit(0)
    address, port = os.read(reads, 64).decode().split()
    assert os.read(reads, 6) == b"forked"
    os.close(writes)
    places = {0: (address, int(port))}
    os.kill(pid, signal.SIGSTOP)
    assert lifelines.asked(places, wait_s=30)["here"] == [0]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert lifelines.asked(places, wait_s=30)["gone"] == [0]


def test_lines_count_for_the_world_that_they_were_learnt_for(monkeypatch):
    monkeypatch.setattr(lifelines, "_LINES", lifelines._Lines())
    world = object()
    assert not lifelines.is_known(None)
    lifelines.learn(world, [f"127.0.0.1 {closed_port()}", "", "nonsense", "127.0.0.1 x"])
    assert lifelines.roll_call(world, range(5)) == {"here": [], "gone": [0], "silent": []}
    assert lifelines.roll_call(object(), range(5)) == {"here": [], "gone": [], "silent": []}


def ask_and_fail():
    rank, said = dist.get_rank(), {}
    mesh_for("data=2,domain=2")
    said["found"] = lifelines.roll_call(dist.group.WORLD, range(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "_PATIENCE_S", 0.0)
        for text in ("Connection closed by peer [10.0.0.1]:3", "Timed out waiting 20000ms", "Expected 3 sizes, got 2"):
            with pytest.raises(RuntimeError) as caught, peers.naming(None, "data_domain", "encoder.conv|F.conv2d"):
                raise RuntimeError(text)
            said[text] = type(caught.value).__name__, str(caught.value)
        place = dict(lifelines._LINES.places)
        patch.setitem(lifelines._LINES.places, (rank + 1) % 4, ("127.0.0.1", closed_port()))
        with pytest.raises(meshpar.PeerError) as caught, peers.naming(None, "data_domain", "|F.conv2d"):
            raise RuntimeError("something else")
        said["gone"] = str(caught.value)
        lifelines._LINES.places.update(place)
    with pytest.raises(meshpar.SpecError), peers.naming(None, "x", "y"):
        raise meshpar.SpecError
    dist.barrier()
    return said


def test_an_error_names_op_axis_ranks_and_who_is_gone():
    for rank, said in enumerate(run_ranks(ask_and_fail, 4)):
        assert said["found"] == {"here": [0, 1, 2, 3], "gone": [], "silent": []}
        others = [other for other in range(4) if other != rank]
        for text in ("Connection closed by peer [10.0.0.1]:3", "Timed out waiting 20000ms"):
            name, told = said[text]
            assert name == "PeerError"
            assert told.startswith("encoder.conv: F.conv2d lost a peer on axis data_domain.")
            assert f"rank {rank} waited for global rank(s) {others}" in told
            assert "all ranks are alive: one is late" in told
            assert text in told
        assert said["Expected 3 sizes, got 2"] == ("RuntimeError", "Expected 3 sizes, got 2")
        assert f"gone: global rank(s) [{(rank + 1) % 4}]" in said["gone"]


def redistribute_late(rank_late):
    mesh = mesh_for("domain=2")
    x = meshpar.shard(torch.ones(4, 2), mesh, "domain _")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])

        def fail(*args, **kwargs):
            raise RuntimeError("Connection reset by peer")

        patch.setattr(peers, "_PATIENCE_S", 0.0)
        patch.setattr(torch.ops._c10d_functional, "wait_tensor", fail)
        with pytest.raises(meshpar.PeerError, match="redistribute of a DTensor lost a peer on axis domain"):
            x.full_tensor()
    return True


def test_what_dtensor_sends_by_itself_is_named_too():
    assert run_ranks(redistribute_late, 2, 0) == [True, True]
