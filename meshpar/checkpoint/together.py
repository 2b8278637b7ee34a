"""Steps that all ranks take together: what fails on one is the same error on all.

Invariant: every function here is called by all ranks of its team in the same order, and either returns on all of them
or raises a `CheckpointError` on all of them, or a `SpecError` where that is what was raised. DCP has such steps of its
own, but raises a `BaseException` from them.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from meshpar.errors import CheckpointError, SpecError, explain
from meshpar.peers import who_is_gone

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Team:
    """Hold the ranks that take steps together: those of a group of all ranks, or this process alone."""

    group: dist.ProcessGroup | None
    rank: int
    size: int


@dataclass(frozen=True)
class _Failure:
    """What a rank sends in the place of a result."""

    text: str
    said: bool  # it was an error of ours, laid out already
    of_request: bool = False  # a `SpecError`


@dataclass(frozen=True)
class _All:
    """What rank 0 hands to every rank when some have failed: what each has sent."""

    values: list[Any]


_BACKGROUND: list[tuple[object, dist.ProcessGroup]] = []
"""The group of the background, and the world that it was made for."""


def team() -> Team:
    """Give the team of all ranks, over the default group."""
    if not dist.is_initialized():
        return Team(None, 0, 1)
    return Team(dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def background_team() -> Team:
    """Give the team of all ranks over a group of its own, so that its steps do not meet those of the training.

    Communication:
        At the first call: the making of a gloo group, on all ranks.
    """
    if not dist.is_initialized():
        return Team(None, 0, 1)
    if not _BACKGROUND or _BACKGROUND[0][0] is not dist.group.WORLD:
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=30))
        _BACKGROUND[:] = [(dist.group.WORLD, group)]
    return Team(_BACKGROUND[0][1], dist.get_rank(), dist.get_world_size())


_OWN: dict[float, tuple[object, dist.ProcessGroup]] = {}
"""The groups of `own_team`, by timeout, each with the world that it was made for."""


def own_team(timeout_s: float) -> Team:
    """Give the team of all ranks over a gloo group of its own, whose steps may take longer than those of the training.

    Args:
        timeout_s: how long a rank waits for the others in a step; the same on every rank.

    Communication:
        At the first call, and after a step in which a rank was lost: the making of a group, on all ranks.
    """
    if not dist.is_initialized():
        return Team(None, 0, 1)
    kept = _OWN.get(timeout_s)
    if kept is None or kept[0] is not dist.group.WORLD:
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        kept = _OWN[timeout_s] = (dist.group.WORLD, group)
    return Team(kept[1], dist.get_rank(), dist.get_world_size())


def everyone(team: Team, what: str, act: Callable[[], T], *, fix: str) -> list[T]:
    """Let every rank act, and give the results of all, in rank order.

    Args:
        team: the ranks.
        what: first line of the error.
        act: what a rank does; its result is small.
        fix: what to do about the error.

    Communication:
        An all-gather of the results.

    Raises:
        CheckpointError: it failed on a rank.
    """
    mine, error = _attempt(act)
    everybody: list[Any] = [mine] * team.size
    if team.size > 1:
        _lost(what, team, lambda: dist.all_gather_object(everybody, mine, group=team.group))
    _check(what, everybody, fix, error)
    return everybody


def first(team: Team, what: str, act: Callable[[], T], *, fix: str) -> T:
    """Let rank 0 act, and give its result on all ranks.

    Communication:
        A broadcast of the result.

    Raises:
        CheckpointError: it failed.
    """
    mine, error = _attempt(act) if team.rank == 0 else (None, None)
    told: list[Any] = [mine]
    if team.size > 1:
        _lost(what, team, lambda: dist.broadcast_object_list(told, src=0, group=team.group))
    _check(what, told, fix, error)
    return told[0]  # type: ignore[no-any-return]


def by_first(team: Team, what: str, act: Callable[[], T], combine: Callable[[list[T]], Sequence[R]], *, fix: str) -> R:
    """Let every rank act, and rank 0 make something for every rank out of the results.

    Communication:
        A gather to rank 0, and a scatter from it.

    Raises:
        CheckpointError: it failed on a rank.
    """
    mine, error = _attempt(act)
    given: list[Any] = [mine] * team.size
    if team.size > 1:
        _lost(what, team, lambda: dist.gather_object(mine, given if team.rank == 0 else None, dst=0, group=team.group))
    parts: list[Any] = [None] * team.size
    if team.rank == 0:
        failures = [value for value in given if isinstance(value, _Failure)]
        made, cause = _attempt(lambda: list(combine(given))) if not failures else (_All(given), None)
        error = error or cause
        parts = made if isinstance(made, list) else [made] * team.size
    told: list[Any] = parts[:1]
    if team.size > 1:
        told = [None]
        _lost(
            what,
            team,
            lambda: dist.scatter_object_list(told, parts if team.rank == 0 else None, src=0, group=team.group),
        )
    _check(what, told[0].values if isinstance(told[0], _All) else told, fix, error)
    return told[0]  # type: ignore[no-any-return]


def _attempt(act: Callable[[], T]) -> tuple[T | _Failure, Exception | None]:
    try:
        return act(), None
    except (CheckpointError, SpecError) as error:
        return _Failure(str(error), said=True, of_request=isinstance(error, SpecError)), error
    except Exception as error:
        return _Failure(f"{type(error).__name__}: {error}", said=False), error


def _lost(what: str, us: Team, communicate: Callable[[], Any]) -> None:
    """Communicate, and say which step it was when a rank does not answer."""
    try:
        communicate()
    except RuntimeError as error:
        _OWN.clear()  # a group that has lost a rank cannot be used again
        text = explain(
            what,
            got=[
                f"rank {us.rank} of {us.size} had no answer of a rank",
                *who_is_gone(error),
                *str(error).splitlines()[:1],
            ],
            needs="every rank to take part",
            fix="start again; checkpoints that were complete are as they were",
        )
        raise CheckpointError(text) from error


def _check(what: str, told: list[Any], fix: str, cause: Exception | None) -> None:
    failures = {rank: value for rank, value in enumerate(told) if isinstance(value, _Failure)}
    if not failures:
        return
    texts = {failure.text for failure in failures.values()}
    kind = SpecError if all(failure.of_request for failure in failures.values()) else CheckpointError
    if len(texts) == 1 and all(failure.said for failure in failures.values()):
        raise kind(texts.pop()) from cause
    where = {f"rank {rank}: " if len(told) > 1 else "": failure for rank, failure in failures.items()}
    got = [line for who, failure in list(where.items())[:5] for line in f"{who}{failure.text}".splitlines()]
    raise kind(explain(what, got=got, needs="every rank to succeed", fix=fix)) from cause
