"""A program that trains and saves on ranks that it kills, again and again, and tells what it saw.

The ranks are forks of one process that imports torch once. They write what they do into files, and a byte into a pipe
when a save begins, so that the kill lands in it.
"""

import datetime
import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import runs
import torch
import torch.distributed as dist

import meshpar
from meshpar import private
from meshpar.checkpoint import folders

SPEC, NUM_RANKS = "data=1,domain=2", 2
KEEP = 2


class Heavy(runs.Net):
    """A net whose saves take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = torch.nn.Parameter(torch.zeros(1000, 1000), requires_grad=False)


def be_rank(rank, store, folder, begun, asynchronous, last_step, log):
    """Go on from the last checkpoint, and save at every step."""
    timeout = datetime.timedelta(seconds=20)
    kept = dist.FileStore(store, NUM_RANKS)
    dist.init_process_group("gloo", store=kept, rank=rank, world_size=NUM_RANKS, timeout=timeout)
    run = runs.Run(SPEC, make=Heavy)
    if meshpar.latest_checkpoint(folder):
        run.load(folder)
    while run.step < last_step:
        loss = run.train(1)[0]
        if rank == 0:
            log.write(f"loss {run.step} {loss!r}\n")
        os.write(begun, b".")
        saving = run.save(folder, keep=KEEP, asynchronous=asynchronous)
        if asynchronous and run.step % 2:
            time.sleep(0.01)  # the next step meets a save that is still at work, or one that is not
        else:
            saving.result()
            if rank == 0:
                log.write(f"saved {run.step}\n")
    meshpar.checkpoint.save.wait_for_pending()
    if rank == 0:
        log.write("end\n")


def start(store, folder, asynchronous, last_step, log_path):
    """Fork the ranks; give their pids, and the pipe that tells of saves."""
    reads, begun = os.pipe()
    pids = []
    for rank in range(NUM_RANKS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(reads)
                if rank:  # so that the pipe ends with rank 0
                    os.close(begun)
                    begun = os.open(os.devnull, os.O_WRONLY)
                with open(log_path, "a", buffering=1) as log:
                    be_rank(rank, store, folder, begun, asynchronous, last_step, log)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    os.close(begun)
    return pids, reads


def kill_in_a_save(number, folder, logs, asynchronous, chance):
    """Let the ranks train, kill one or all of them some time after a save has begun, and tell what is left."""
    log = logs / f"{number}"
    pids, begun = start(str(logs / f"store{number}"), str(folder), asynchronous, 10**6, log)
    os.read(begun, 1 + chance.randrange(3))
    while not os.read(begun, 1):
        raise RuntimeError("the ranks ended before they were killed")
    time.sleep(chance.uniform(0.0, 0.12))
    for pid in pids if chance.random() < 0.5 else [chance.choice(pids)]:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.1 * chance.random())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(begun)
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    latest = meshpar.latest_checkpoint(folder)
    if latest is not None:
        folders.read_manifest(latest.path)
    return {
        "log": log.read_text().splitlines() if log.exists() else [],
        "left": [name for name in names if name.startswith(".")],
        "complete": [saved.step for saved in meshpar.list_checkpoints(folder)],
    }


def save_until(where, number):
    """Save three times, and be killed at the file operation of that number of the third save."""
    run = runs.Run("")
    for _ in range(2):
        run.train(1)
        run.save(str(where), keep=2)
    run.train(1)
    count = 0

    def hook(event, args):
        nonlocal count
        told = any(isinstance(a, str | bytes | os.PathLike) and str(where) in str(a) for a in args)
        if told and event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    run.save(str(where), keep=2)


def kill_at_every_event(folder):
    """Kill a process at the first, the second, ... file operation of its third save, until a save comes through."""
    seen = []
    for number in range(1, 1000):
        where = folder / str(number)
        pid = os.fork()
        if pid == 0:
            try:
                save_until(where, number)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        complete = [saved.step for saved in meshpar.list_checkpoints(where)]
        folders.read_manifest(meshpar.latest_checkpoint(where).path)
        seen.append({"code": code, "complete": complete, "left": [p.name for p in where.iterdir() if p.name[0] == "."]})
        if code != -signal.SIGKILL:
            break
    return seen


def main():
    """Play the scene that is asked for, and print what was seen."""
    torch.set_num_threads(1)
    for name in ("torch.distributed.tensor", "torch.distributed.fsdp", private.DYNAMO):
        importlib.import_module(name)  # once, for all ranks
    scene, base = sys.argv[1], Path(sys.argv[2])
    logs = base / "logs"
    logs.mkdir()
    if scene == "events":
        print(json.dumps(kill_at_every_event(base)))
        return
    folder, chance = base / "run", random.Random(scene)
    asynchronous = scene == "asynchronous"
    seen = [kill_in_a_save(i, folder, logs, asynchronous, chance) for i in range(3 if asynchronous else 10)]
    latest = meshpar.latest_checkpoint(folder)
    log = logs / "last"
    last_step = (latest.step if latest else 0) + 2
    pids, begun = start(str(logs / "store"), str(folder), asynchronous, last_step, log)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.close(begun)
    names = sorted(path.name for path in folder.iterdir())
    print(json.dumps({"kills": seen, "codes": codes, "last": log.read_text().splitlines(), "names": names}))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    main()
