"""`Ranks`: processes of this machine that run what a notebook asks for.

Invariant: this process gets no process group. Ranks that are kept are idle and in step (`meshpar.testing.pool`); after
an error, an interrupt or a death the next call starts new ones.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from meshpar.errors import SpecError, explain
from meshpar.runtime import refuse_rank_of_a_job
from meshpar.share.segments import rooms
from meshpar.showing import Picture, show
from meshpar.simulating.carry import dumps, packed
from meshpar.simulating.pieces import pieces_in
from meshpar.spec import MeshSpec
from meshpar.tables import tell_bytes
from meshpar.testing import mesh_for
from meshpar.testing.pool import MAX_RANKS, RankError, run_ranks, shutdown_pool

RANK_BYTES = 60_000_000
"""What a rank takes for itself after a step, beside what it is given; a test measures it."""

COPIES = 8
"""Of what a rank is given, at the most: as it came, whole, cut, gradients of both, pieces and their way back; once more
for the single process and what is gathered."""


@dataclass(frozen=True)
class Ranks:
    """Be the ranks of a mesh, as processes of this machine; made by `simulate`.

    The processes start at the first call, and are kept for the next ones, also of other meshes of as many ranks. They
    end with `close`, at the end of a `with` block, or with this process, however it ends.

    Args:
        spec: the mesh; all sizes are known.
        timeout_s: the most seconds that a call may take.
    """

    spec: MeshSpec
    timeout_s: float = 120.0

    @property
    def num_ranks(self) -> int:
        """Count the ranks."""
        return count_ranks(self.spec)

    @property
    def picture(self) -> Picture:
        """Draw the mesh."""
        return show(self.spec)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function on all ranks; the same one that a script would run under torchrun.

        Args:
            function: called on every rank as `function(mesh, *args, **kwargs)`; it may be defined in the notebook. What
                it prints is printed here, with the rank in front.
            *args: copied to every rank.
            **kwargs: copied to every rank.

        Returns:
            What each rank returns, in rank order. A DTensor comes as the `Piece` that the rank holds of it.

        Communication:
            That of the function. Random numbers start at the same state on all ranks in every call.

        Raises:
            SpecError: function or arguments cannot be sent, or do not fit the memory of this machine.
            RankError: a rank raised, died or did not answer in time; it says which one, with its traceback.

        Example:
            >>> import meshpar, torch
            >>> ranks = meshpar.simulate("domain=2")
            >>> ranks.run(lambda mesh, x: meshpar.shard(x, mesh), torch.zeros(1, 1, 5, 8))[1].lines()
            'rows 3 to 4'
        """
        parts = {"function": function, **{f"argument {i}": x for i, x in enumerate(args)}, **kwargs}
        payload = packed({**parts, "names of the arguments": tuple(kwargs)})
        return self._run(payload, len(args))

    def _run(self, payload: bytes, num_args: int) -> list[Any]:
        check_room(self.num_ranks, len(payload))
        check_alone()
        try:
            answers = run_ranks(_answer, self.num_ranks, payload, num_args, str(self.spec), timeout_s=self.timeout_s)
        except RankError as error:
            text = str(error).replace("run_ranks:", "simulate:", 1)
            raise RankError(text, error.exceptions, error.tracebacks) from error.__cause__
        _tell([said for _, said in answers])
        return [_loaded(rank, body) for rank, (body, _) in enumerate(answers)]

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        shutdown_pool(self.num_ranks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks on this machine, {self.picture}"

    def _repr_html_(self) -> str:
        return f"<p>{self.num_ranks} ranks on this machine</p>{self.picture.svg()}"


def ranks_for(spec: Any, timeout_s: float) -> Ranks:
    """Read a mesh, an open size being 1, and check that this machine may be asked for it.

    Raises:
        SpecError: no mesh, or too many ranks.
    """
    asked = MeshSpec.parse(spec)
    found = MeshSpec(**{axis: 1 if size == -1 else size for axis, size in asked.sizes().items()})
    if count_ranks(found) > MAX_RANKS:
        raise SpecError(
            explain(
                "simulate: too many ranks for one machine.",
                got=f"{found}: {count_ranks(found)} processes, on {os.cpu_count()} cores",
                needs=f"at most {MAX_RANKS}",
                fix="a smaller mesh; meshpar.plan tells of any mesh what its ranks hold and send, without processes",
            )
        )
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        got, needs = f"timeout_s={timeout_s!r}", "seconds, more than 0"
        raise SpecError(explain("simulate: no time limit.", got=got, needs=needs, fix="timeout_s=120"))
    return Ranks(found, float(timeout_s))


def count_ranks(spec: MeshSpec) -> int:
    """Multiply the sizes of a spec."""
    return math.prod(spec.sizes().values())


def check_room(num_ranks: int, num_bytes: int) -> None:
    """Check that copies of what the ranks are given fit into the memory that is left.

    Raises:
        SpecError: they do not.
    """
    needed = num_ranks * RANK_BYTES + (num_ranks + 1) * COPIES * num_bytes
    where, left = min(rooms().items(), key=lambda item: item[1])
    if needed > left:
        raise SpecError(
            explain(
                "simulate: does not fit the memory of this machine.",
                got=[
                    f"{num_ranks} ranks, {tell_bytes(num_bytes)} of model and arguments: {tell_bytes(needed)}, without "
                    "activations",
                    f"{tell_bytes(max(left, 0))} left ({where})",
                ],
                needs="a small model: every rank is a process with a copy of what it is given",
                fix="fewer ranks, fewer channels, a coarser grid; meshpar.plan takes the model as it is",
            )
        )


def check_alone() -> None:
    """Refuse to start ranks from a rank.

    Raises:
        SpecError: this process is one of several of a job.
    """
    fix = "a notebook, or python script.py without torchrun; on ranks call the function itself"
    refuse_rank_of_a_job("simulate", needs="one process, which starts ranks of its own", fix=fix)


def _answer(payload: bytes, num_args: int, spec: str) -> tuple[bytes, str]:
    """Run the function of a call on this rank; give its result, and what it printed."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            function, *values = pickle.loads(payload)
            names = values.pop()
            result = function(mesh_for(spec), *values[:num_args], **dict(zip(names, values[num_args:], strict=True)))
    except BaseException as error:
        if said.getvalue():
            error.add_note(f"It had printed:\n{said.getvalue().rstrip()}")
        raise
    try:
        return dumps(pieces_in(result)), said.getvalue()
    except Exception as error:
        raise SpecError(
            explain(
                "simulate: what the function returns cannot be sent back.",
                got=f"a {type(result).__name__}; {type(error).__name__}: {str(error).splitlines()[0][:200]}",
                needs="tensors, numbers, text, and trees or dataclasses of them",
                fix="return what you want to see of it, e.g. meshpar.full_state_dict(model)",
            )
        ) from error


def _loaded(rank: int, body: bytes) -> Any:
    try:
        return pickle.loads(body)
    except Exception as error:
        raise SpecError(
            explain(
                f"simulate: what rank {rank} returns cannot be read here.",
                got=f"{type(error).__name__}: {error}",
                needs="values of classes that this process can import, too",
                fix="return tensors, numbers, text, and trees of them",
            )
        ) from error


def _tell(said: list[str]) -> None:
    """Print what the ranks printed, once where all said the same."""
    if not any(said):
        return
    if len(set(said)) == 1 and len(said) > 1:
        groups = [("all ranks", said[0])]
    else:
        groups = [(f"rank {rank}", text) for rank, text in enumerate(said)]
    for who, text in groups:
        for line in text.splitlines():
            print(f"[{who}] {line}")
