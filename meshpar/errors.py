"""The errors that meshpar raises for its users, and how their text is laid out.

Invariant: an error about a request is raised on all ranks alike, before any communication of that request, and says
what was asked, what was got with its sizes, the rule, and what to do. Tensor values are never printed.
"""

from __future__ import annotations

from collections.abc import Iterable


class MeshparError(Exception):
    """Be the root of every error of this library."""


class SpecError(MeshparError, ValueError):
    """Report a mesh, layout or argument that cannot work."""


class ShardingError(MeshparError, ValueError):
    """Report an operation that cannot run on these placements."""


class GatherError(MeshparError, RuntimeError):
    """Report an operation that would gather where the user asked for none (`on_gather="error"`)."""


class PeerError(MeshparError, RuntimeError):
    """Report a rank that died or did not come to an exchange within the timeout of its group."""


class NonFiniteError(MeshparError, RuntimeError):
    """Report gradients that hold inf or nan where the user asked for an error."""


class CheckpointError(MeshparError, RuntimeError):
    """Report a checkpoint that cannot be written or read, or does not fit the model; on all ranks."""


class ShareError(MeshparError, RuntimeError):
    """Report something that cannot be passed from rank to rank, or a rank that raised while others waited."""


class GatherWarning(UserWarning):
    """Warn, once per call site, that an operation gathers its inputs."""


def explain(what: str, *, got: str | Iterable[str], needs: str, fix: str) -> str:
    """Lay out the text of an error: what failed, what was got, the rule, what to do.

    Example:
        >>> print(explain("mesh: cannot be made.", got="data=3", needs="3 to divide 4 ranks", fix="data=2"))
        mesh: cannot be made.
          got:    data=3
          needs:  3 to divide 4 ranks
          fix:    data=2
    """
    lines = [got] if isinstance(got, str) else list(got)
    first, *rest = lines or [""]
    body = [f"  got:    {first}", *(f"          {line}" for line in rest)]
    return "\n".join([what, *body, f"  needs:  {needs}", f"  fix:    {fix}"])
