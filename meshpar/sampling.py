"""Which samples a rank loads, and in what order; and going over a loader so that no rank stops before the others.

Invariant: the global batches of an epoch follow from the length, the seed, the epoch and the batch size alone, not from
the mesh; each is cut in the canonical layout over the ranks that share out samples, so that the parts make the batch of
one process, in its order.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader, Sampler, default_collate

from meshpar import pieces
from meshpar.agree import hear_all, same_everywhere
from meshpar.batch import check_mesh, placements_of
from meshpar.errors import PeerError, SpecError, explain
from meshpar.intervals import chunks
from meshpar.mesh import ranks_of
from meshpar.trees import children, rebuilt

T = TypeVar("T")

_AT_END, _HAS_ONE, _FAILED = range(3)


class DataSampler(Sampler[list[int]]):
    """Share out samples over the data ranks: a batch sampler for `torch.utils.data.DataLoader`.

    All ranks of one data coordinate get the same samples. Global batches are those of one process with the same seed,
    whatever the mesh.

    Args:
        dataset: a dataset with a length, or the length.
        mesh: mesh of `make_mesh`.
        batch_size: samples of a *global* batch, over all data ranks.
        shuffle: whether each epoch has an order of its own, which the seed and the epoch fix.
        seed: any integer.
        drop_last: leave out the last batch of an epoch where it is smaller.
        empty_parts: what to do where a batch is so small that the canonical layout leaves a data rank without samples
            (5 over 4 ranks is 2, 2, 1, 0): "refuse", or "yield" an empty list, for loaders whose collate function is
            `collate_or_empty`.

    Communication:
        Here, and at the start of `follow`: about 100 bytes to all ranks, which must all make the same sampler.

    Raises:
        SpecError: a length, batch size or option that cannot work, or that differs between ranks; on all ranks.

    Example:
        >>> import meshpar
        >>> sampler = DataSampler(5, meshpar.make_mesh("data=1"), batch_size=2, shuffle=False)
        >>> list(sampler)
        [[0, 1], [2, 3], [4]]
        >>> for batch in sampler.follow(DataLoader([10, 11, 12, 13, 14], batch_sampler=sampler)):
        ...     print(batch.tolist(), sampler.state_dict()["position"])
        [10, 11] 2
        [12, 13] 4
        [14] 0
    """

    def __init__(
        self,
        dataset: Sized | int,
        mesh: DeviceMesh,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        empty_parts: str = "refuse",
    ) -> None:
        check_mesh("DataSampler", mesh)
        self._length = _length_of(dataset)
        facts: dict[str, Any] = {
            "dataset length": self._length,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "seed": seed,
        }
        facts |= {"drop_last": drop_last, "empty_parts": empty_parts}
        # Before anything is refused: what is wrong on one rank alone must be an error on all.
        self.mesh = mesh
        self._agree({name: value if isinstance(value, int | str) else repr(value) for name, value in facts.items()})
        wrong = [] if empty_parts in ("refuse", "yield") else [f"empty_parts={empty_parts!r}"]
        wrong += [] if _is_integer(batch_size) and batch_size > 0 else [f"batch_size={batch_size!r}"]
        wrong += [] if _is_integer(seed) else [f"seed={seed!r}"]
        wrong += [f"{type(dataset).__name__}: a dataset without a length"] if self._length < 0 else []
        if wrong:
            needs = 'a length, a batch size of 1 or more, an integer seed, empty_parts of "refuse" or "yield"'
            fix = "e.g. batch_size=16; for streams meshpar.in_step(loader, mesh), one stream for each data coordinate"
            raise SpecError(explain("DataSampler: cannot be made.", got=wrong, needs=needs, fix=fix))
        self.batch_size, self.drop_last = int(batch_size), bool(drop_last)
        self._shuffle, self._seed, self._empty_parts = bool(shuffle), int(seed), empty_parts
        self._epoch = self._position = self._begin = 0
        self._is_followed = self._is_loose = False
        self._refuse_empty_parts(0)

    def _agree(self, facts: Mapping[str, Any]) -> None:
        fix = "make the sampler from the same dataset and options on all ranks, and load the same state"
        same_everywhere("DataSampler", facts, self.mesh, fix=fix)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._now()[0]

    def __len__(self) -> int:
        """Count the global batches from where this epoch began, or was resumed: the same number on every rank."""
        begin = self._begin if self._is_followed else self._position
        return self._num_left(begin)

    def _num_left(self, position: int) -> int:
        left = self._length - position
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def _now(self) -> tuple[int, int]:
        """Give epoch and position of the next sample: those of the next epoch where no batch is left."""
        if self._position and not self._num_left(self._position):
            return self._epoch + 1, 0
        return self._epoch, self._position

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing changes if this is the epoch that is under way, or was resumed."""
        if epoch != self._now()[0]:
            self._epoch, self._position = int(epoch), 0
        else:
            self._epoch, self._position = self._now()
        self._is_loose = False

    def global_batches(self) -> Iterator[list[int]]:
        """Go over the global batches that are left of this epoch: what one process would load."""
        epoch, position = self._now()
        order: Any = range(self._length)
        if self._shuffle:
            digest = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            order = torch.randperm(self._length, generator=generator)
        for start in range(position, position + self._num_left(position) * self.batch_size, self.batch_size):
            batch = order[start : min(start + self.batch_size, self._length)]
            yield batch.tolist() if self._shuffle else list(batch)

    def part_of(self, batch: list[int]) -> list[int]:
        """Give this rank's part of a global batch, in the canonical layout; it may be empty."""
        for axis, placement in enumerate(placements_of(None, self.mesh, 1)):
            if isinstance(placement, Shard):
                a, b = pieces.my_chunk(self.mesh, axis, len(batch))
                batch = batch[a:b]
        return batch

    def __iter__(self) -> Iterator[list[int]]:
        """Go over this rank's parts of the global batches that are left of this epoch."""
        return self._parts(self.global_batches())

    def _parts(self, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        for batch in batches:
            self._is_loose = self._is_loose or not self._is_followed
            yield self.part_of(batch)
        if not self._is_followed:
            self._position = 0  # no one counts what is taken: the next epoch is whole again

    def follow(self, loader: Iterable[T]) -> Iterator[T]:
        """Go over a loader of this sampler, and count what was taken, so that `state_dict` is right in the loop.

        Workers may run ahead. After the last batch of an epoch the next epoch begins. A loop that was left early goes
        on where it was.

        Args:
            loader: a `DataLoader` with `batch_sampler=` this sampler, or any iterable of one item a global batch.

        Communication:
            8 bytes to all ranks before each batch, see `in_step`.

        Raises:
            SpecError: a loader of another sampler, or states that differ between ranks; on all ranks.
        """
        if isinstance(loader, DataLoader) and not self._feeds(loader):
            needs = "a loader that takes its batches from this sampler"
            fix = "DataLoader(dataset, batch_sampler=sampler, ...)"
            got = (
                f"a DataLoader with batch_sampler {type(loader.batch_sampler).__name__}, batch_size {loader.batch_size}"
            )
            raise SpecError(explain("DataSampler.follow: another sampler's loader.", got=got, needs=needs, fix=fix))
        self._epoch, self._position = self._now()
        self._agree({"epoch": self._epoch, "position": self._position, "seed": self._seed, "shuffle": self._shuffle})
        self._begin, self._is_followed, self._is_loose = self._position, True, False
        expected, count = self._num_left(self._begin), 0
        try:
            for batch in in_step(loader, self.mesh):
                count += 1
                if count > expected:
                    break
                self._position = min(self._begin + count * self.batch_size, self._length)
                yield batch
            if count != expected:
                got = f"{'more than ' * (count > expected)}{min(count, expected)} batches"
                needs = f"{expected}, one for each global batch of {self.batch_size} samples"
                fix = "DataLoader(dataset, batch_sampler=sampler, ...), or iterate over the sampler itself"
                raise SpecError(explain("DataSampler.follow: not one item a batch.", got=got, needs=needs, fix=fix))
            self._epoch, self._position = self._epoch + 1, 0
        finally:
            self._is_followed = False

    def _feeds(self, loader: DataLoader[Any]) -> bool:
        """Tell whether a loader takes its batches from here, and leaves them as they are."""
        return loader.batch_sampler is self or (loader.sampler is self and loader.batch_size is None)

    def state_dict(self) -> dict[str, Any]:
        """Give the place of the next sample in *global* samples: it can be loaded on any mesh, with any batch size.

        Raises:
            SpecError: batches were taken that nobody counted: a loader with workers runs ahead of its loop.
        """
        if self._is_loose:
            raise SpecError(
                explain(
                    "DataSampler.state_dict: nobody counted the batches that were used.",
                    got="batches taken from the sampler itself, or by a loader, whose workers run ahead",
                    needs="a loop over sampler.follow(loader), or the start of an epoch (set_epoch)",
                    fix="for batch in sampler.follow(loader): ...",
                )
            )
        epoch, position = self._now()
        return {
            "epoch": epoch,
            "position": position,
            "length": self._length,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken; its seed and order are taken too, the batch size and mesh may be others.

        Raises:
            SpecError: not a state of a sampler, or one of a dataset of another length.
        """
        numbers = [state.get(name) for name in ("epoch", "position", "length", "seed")]
        if not all(_is_integer(n) for n in numbers) or state["length"] != self._length or "shuffle" not in state:
            raise SpecError(
                explain(
                    "DataSampler.load_state_dict: not a state of this sampler.",
                    got=f"keys {sorted(state)}, length {state.get('length')}",
                    needs=f"epoch, position, length, seed and shuffle, for a dataset of length {self._length}",
                    fix="load what state_dict gave, on the same dataset",
                )
            )
        self._refuse_empty_parts(int(state["position"]))
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._seed, self._shuffle = int(state["seed"]), bool(state["shuffle"])
        self._is_loose = False

    def _refuse_empty_parts(self, position: int) -> None:
        """Refuse batches that leave a rank without samples, here, before one rank finds itself without."""
        if self._empty_parts == "yield":
            return
        left = self._length - position
        sizes = {self.batch_size} if left >= self.batch_size else set()
        sizes |= {left % self.batch_size} if left % self.batch_size and not self.drop_last else set()
        axes = [i for i, p in enumerate(placements_of(None, self.mesh, 1)) if isinstance(p, Shard)]
        bad = {n: parts for n in sorted(sizes) if 0 in (parts := _parts_of(n, [self.mesh.size(i) for i in axes]))}
        if bad:
            raise SpecError(
                explain(
                    "DataSampler: some batches would leave a data rank without samples.",
                    got=[f"{n} samples over data ranks: {parts}" for n, parts in bad.items()],
                    needs="at least one sample of each batch on every data rank, in the canonical layout",
                    fix="drop_last=True, or another batch_size (a multiple of the data ranks); or "
                    "empty_parts='yield' with collate_fn=meshpar.collate_or_empty(dataset)",
                )
            )


def _parts_of(n: int, sizes: list[int]) -> list[int]:
    parts = [n]
    for size in sizes:
        parts = [b - a for part in parts for a, b in chunks(part, size)]
    return parts


def _is_integer(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _length_of(dataset: Sized | int) -> int:
    try:
        length = dataset if isinstance(dataset, int) else len(dataset)
    except TypeError:
        return -1
    return length if _is_integer(length) else -1


def in_step(loader: Iterable[T], mesh: DeviceMesh) -> Iterator[T]:
    """Go over a loader on all ranks at once: none goes on with a batch unless all have one.

    Args:
        loader: any iterable; on each rank its own.
        mesh: mesh of `make_mesh`.

    Communication:
        8 bytes to all ranks before each batch.

    Raises:
        SpecError: some ranks have no batch left and others have; on all ranks.
        PeerError: the loader of another rank failed. On that rank its own error is raised.

    Example:
        >>> import meshpar
        >>> list(in_step(["a", "b"], meshpar.make_mesh("data=1")))
        ['a', 'b']
    """
    check_mesh("in_step", mesh)
    items: Iterator[T] | None = None
    count = 0
    while True:
        item: Any = None
        failure: Exception | None = None
        state = _HAS_ONE
        try:
            items = iter(loader) if items is None else items
            item = next(items)
        except StopIteration:
            state = _AT_END
        except Exception as error:
            failure, state = error, _FAILED
        told = hear_all(torch.tensor([state], dtype=torch.int64), mesh, "in_step").flatten().tolist()
        if failure is not None:
            raise failure
        ranks = ranks_of(mesh)
        failed, ended = ([r for r, s in zip(ranks, told, strict=True) if s == kind] for kind in (_FAILED, _AT_END))
        if failed:
            needs = "a batch on every rank"
            fix = "look at the log of the ranks named"
            got = f"the loader of rank(s) {failed} raised an error"
            raise PeerError(explain(f"in_step: no batch {count}.", got=got, needs=needs, fix=fix))
        if len(ended) == len(ranks):
            return
        if ended:
            raise SpecError(
                explain(
                    "in_step: some ranks ran out of batches.",
                    got=f"after {count} batches rank(s) {ended} had none left; this is rank {dist.get_rank()}",
                    needs="the same number of batches on every rank",
                    fix="let DataSampler share out the samples; or cut the loaders to the same length",
                )
            )
        count += 1
        yield item


def collate_or_empty(dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> Callable[[list[Any]], Any]:
    """Make a collate function that gives an empty batch for no samples: for `DataSampler(..., empty_parts="yield")`.

    The empty batch is that of the first sample, its tensors cut to no rows, its lists of strings or dates empty.

    Args:
        dataset: from which the first sample is taken.
        collate: what collates samples.

    Example:
        >>> collate = collate_or_empty([torch.zeros(3), torch.ones(3)])
        >>> collate([]).shape, collate([torch.ones(3)]).shape
        (torch.Size([0, 3]), torch.Size([1, 3]))
    """
    return functools.partial(_collated, dataset, collate)  # which workers can be sent


def _collated(dataset: Any, collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    return collate(samples) if samples else _emptied(collate([dataset[0]]))


def _emptied(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x[:0] if x.dim() else x
    parts = children(x)
    if parts is None:
        return x
    if type(x) is list and len(x) == 1 and not isinstance(x[0], torch.Tensor) and children(x[0]) is None:
        return []  # one string, number or date a sample
    return rebuilt(x, [key for key, _ in parts], [_emptied(value) for _, value in parts])
