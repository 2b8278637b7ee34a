"""Scenes in which processes die: programs that a test runs, and ranks that such a program forks.

A program imports torch once and forks its ranks, so that a real death costs neither a pool nor an import. What a
program has seen is the last line that it prints, as JSON; a rank leaves what it has seen in a file.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path


def played(program, *arguments, timeout_s):
    """Run a program to its end: give what it has seen, and what it has said besides."""
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(program), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def forked(see, file):
    """Fork a rank that writes what `see()` gives into a file; give its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            Path(file).write_text(json.dumps(see()))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid


def left_in(file):
    """Give what a rank has left in its file; None where it did not come to that."""
    return json.loads(Path(file).read_text()) if Path(file).exists() else None
