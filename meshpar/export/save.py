"""`export_hf`: a checkpoint of Hugging Face from a model that lies over ranks, without a gather.

Invariant: nothing is written before all ranks agree on what is; what fails on one rank is one error on all of them; and
the folder has the old checkpoint, none, or the new one at every moment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshpar.checkpoint.together import Team, everyone, first, own_team
from meshpar.disk import sync_folder
from meshpar.errors import SpecError, explain
from meshpar.export import folder as folders
from meshpar.export.configs import write_configs
from meshpar.export.folder import Staging, new_file, write_all
from meshpar.export.holders import Listing, Owners, Told, listing_of
from meshpar.export.places import Seen, check_writer, chosen_writer, file_system_of, host_id, spread
from meshpar.export.plan import INDEX, Plan, make_plan, size_in_bytes
from meshpar.export.progress import bar
from meshpar.export.state import exported_state
from meshpar.export.two_phase import write_two_phase
from meshpar.export.writers import FIX, Job, open_shown, write_direct

TIMEOUT_S = 1800.0
"""How long a rank waits in a step for the others, which may write for that long."""

_PROBE = ".seen"


@dataclass(frozen=True)
class Exported:
    """Hold what was written.

    Args:
        path: the folder.
        files: the files of weights, in order.
        total_bytes: the bytes of all tensors.
        writer: "direct" or "two-phase".
    """

    path: Path
    files: tuple[str, ...]
    total_bytes: int
    writer: str


def export_hf(
    model: nn.Module | Mapping[str, Tensor],
    dir: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "10GB",
    overwrite: bool = False,
    writer: str = "auto",
    config_of: object = None,
    progress: bool | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Exported:
    """Write a checkpoint of Hugging Face: safetensors files, their index, and the configuration; no rank gathers.

    Every rank writes its own bytes of each tensor. Weights in the folder are replaced where `overwrite` says so; other
    files (a tokenizer) stay. A kill at any moment leaves the old checkpoint, or none that would load.

    Args:
        model: parallelized by meshpar, by `fully_shard`, by `parallelize_module`, or not at all; or the state dict to
            write, of plain tensors and DTensors. Ranks may have different keys (pipeline and expert parallel). Plain
            tensors under one name are taken for equal on all ranks that have it.
        dir: the folder, the same for all ranks.
        max_shard_size: how many bytes of tensors a file may have: "10GB", "512MiB", or a number.
        overwrite: whether a checkpoint that is there is replaced.
        writer: "direct" (every rank writes in place), "two-phase" (one rank a file, for file systems of several hosts
            that are not coherent, like NFS), or "auto".
        config_of: the model whose `config` and `generation_config` are written; the model itself by default.
        progress: whether rank 0 shows a bar; None where the write is long, and standard error is a terminal.
        timeout_s: how long a rank waits for the others in a step.

    Returns:
        What was written, on every rank.

    Communication:
        Over a gloo group of its own: a digest of each rank, the list of its tensors where that differs, and for each of
        about six steps whether it went well. The two-phase writer sends every byte once.

    Raises:
        SpecError: arguments or values that cannot be exported, or ranks that differ in them; on all ranks, and nothing
            was written.
        CheckpointError: the folder is occupied or in use, or a step failed on a rank; on all ranks, and what was there
            is as it was.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> export_hf(nn.Linear(2, 3), folder).files, sorted(os.listdir(folder))
        (('model.safetensors',), ['model.safetensors'])
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        us = own_team(timeout_s)
        is_model = isinstance(model, nn.Module)
        state = exported_state(model) if isinstance(model, nn.Module) else model
        config_of = model if config_of is None and is_model else config_of
        options = {
            "dir": os.path.abspath(dir),
            "max_shard_size": max_shard_size,
            "overwrite": overwrite,
            "writer": writer,
        }
        listing, told = _agree(us, state, options)
        owners = _owners(us, listing, told)
        plan = make_plan(list(owners.entries.values()), size_in_bytes(max_shard_size))
        return _write(us, plan, owners, state, Path(os.path.abspath(dir)), options, config_of, progress)


def _agree(us: Team, state: Mapping[str, Tensor], options: Mapping[str, Any]) -> tuple[Listing, list[Told]]:
    """Let all ranks tell what they have and were asked for."""
    kept: list[Listing] = []

    def tell() -> tuple[Told, dict[str, str]]:
        check_writer(options["writer"])
        size_in_bytes(options["max_shard_size"])
        listing, told = listing_of(state)
        kept.append(listing)
        return told, {name: repr(value) for name, value in options.items()}

    everybody = everyone(us, "export: cannot begin.", tell, fix="see above")
    wrong = [
        f"{name}={asked[name]} on rank {rank}, {everybody[0][1][name]} on rank 0"
        for rank, (_, asked) in enumerate(everybody)
        for name in asked
        if asked[name] != everybody[0][1][name]
    ]
    if wrong:
        fix = "give all ranks the same"
        raise SpecError(explain("export: the ranks differ.", got=wrong[:5], needs="the same arguments", fix=fix))
    return kept[0], [told for told, _ in everybody]


def _owners(us: Team, listing: Listing, told: list[Told]) -> Owners:
    """Let the first rank of each digest tell its list, where there are several, and find who owns what."""
    firsts: dict[str, int] = {}
    for rank, one in enumerate(told):
        firsts.setdefault(one.digest, rank)
    mine = told[us.rank].digest
    listings = {mine: listing}
    if len(firsts) > 1:
        what = "export: the lists of tensors cannot be exchanged."
        texts = everyone(us, what, lambda: listing.to_text() if firsts[mine] == us.rank else "", fix="see above")
        listings |= {digest: Listing.from_text(texts[rank]) for digest, rank in firsts.items() if digest != mine}
    return Owners(listings, told)


def _write(
    us: Team,
    plan: Plan,
    owners: Owners,
    state: Mapping[str, Tensor],
    target: Path,
    options: Mapping[str, Any],
    config_of: object,
    progress: bool | None,  # noqa: FBT001
) -> Exported:
    kept: list[Staging] = []

    def begin() -> str:
        kept.append(folders.begin(target, overwrite=bool(options["overwrite"])))
        with new_file(kept[0].path / _PROBE):
            pass
        return kept[0].path.name

    try:
        path = target / first(us, "export: the folder cannot be made.", begin, fix=FIX)
        seen = everyone(us, "export: not all ranks see the folder.", lambda: _look(path), fix=FIX)
        writer = chosen_writer(options["writer"], seen)
        names = [placed.entry.name for file in plan.files for placed in file.tensors]
        shares = [owners.share_of(name, us.rank) for name in names]
        with bar(
            sum(share[2] - share[1] for share in shares if share), show=progress if us.rank == 0 else False
        ) as told:
            job = Job(us, path, plan, owners, state, spread(seen), told)
            (write_direct if writer == "direct" else write_two_phase)(job)
        first(
            us, "export: the files cannot be put in their places.", lambda: _finish(kept[0], plan, config_of), fix=FIX
        )
    except BaseException:
        for staging in kept:
            folders.abandon(staging)
        raise
    return Exported(target, tuple(file.name for file in plan.files), plan.total_bytes, writer)


def _look(path: Path) -> Seen:
    """See the folder that rank 0 has made."""
    os.close(open_shown(path / _PROBE, os.O_RDONLY, folder_shows=False))
    return Seen(host_id(), file_system_of(path))


def _finish(staging: Staging, plan: Plan, config_of: object) -> None:
    """Add the configuration and the index, check, and let the files take their places."""
    (staging.path / _PROBE).unlink()
    sizes = {file.name: file.num_bytes for file in plan.files}
    sizes |= write_configs(config_of, staging.path)
    if plan.index is not None:
        with new_file(staging.path / INDEX) as handle:
            write_all(handle, plan.index, 0)
        sizes[INDEX] = len(plan.index)
    sync_folder(staging.path)
    folders.check_sizes(staging, sizes)
    folders.commit(staging)
