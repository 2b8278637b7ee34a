"""The exponential moving average of a model's parameters, kept where the parameters are: each rank averages its shards.

`torch.optim.swa_utils.AveragedModel` copies the model, which `fully_shard` does not allow.

Invariant: the average is that of one process, whatever the mesh; nothing is communicated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar.errors import SpecError, explain
from meshpar.shares import cut_as, laid_as, whole_of


class EMA:
    """Average the parameters of a model over steps: `average = decay * average + (1 - decay) * parameter`.

    The first `update` copies, as that of `AveragedModel` with `get_ema_multi_avg_fn(decay)` does.

    Args:
        model: a model of `parallelize`, or any other.
        decay: share of the old average that stays, from 0 to 1.
        use_buffers: whether floating-point buffers are averaged too; otherwise they are copied, as others always are.

    Raises:
        SpecError: a decay that is not from 0 to 1.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> ema = EMA(layer, decay=0.5)
        >>> for value in (1.0, 2.0):
        ...     _ = nn.init.constant_(layer.weight, value)
        ...     ema.update()
        >>> with ema.applied():
        ...     print(layer.weight.item())
        1.5
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, use_buffers: bool = False) -> None:
        if not 0.0 <= decay <= 1.0:
            raise SpecError(
                explain("EMA: unknown decay.", got=f"decay={decay!r}", needs="a number from 0 to 1", fix="decay=0.999")
            )
        self.model = model
        self.decay = decay
        self.use_buffers = use_buffers
        self.num_updates = 0
        self.averages = {name: _piece(x).clone() for name, x in self._held().items()}

    def _held(self) -> dict[str, Tensor]:
        """List the parameters, and the buffers that a state dict holds."""
        kept = self.model.state_dict(keep_vars=True)
        named = [*self.model.named_parameters(), *((n, b) for n, b in self.model.named_buffers() if n in kept)]
        return dict(named)

    @torch.no_grad()
    def update(self) -> None:
        """Take the values of the model into the average; after the step of the optimizer."""
        for name, x in self._held().items():
            average, now = self.averages[name], _piece(x)
            averaged = isinstance(x, nn.Parameter) or self.use_buffers
            if self.num_updates and averaged and (average.is_floating_point() or average.is_complex()):
                average.lerp_(now, 1 - self.decay)
            else:
                average.copy_(now)
        self.num_updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Let the model have the averages as its values inside the block, for an evaluation; not in a backward."""
        self._swap()
        try:
            yield self.model
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, x in self._held().items():
            piece, average = _piece(x), self.averages[name]
            held = piece.clone()
            piece.copy_(average)
            average.copy_(held)

    def state_dict(self) -> dict[str, Any]:
        """Give the averages under the names of the model, laid out as its parameters, and the number of updates."""
        copies = {name: average.clone() for name, average in self.averages.items()}
        averages = {n: laid_as(x, copies[n]) if isinstance(x, DTensor) else copies[n] for n, x in self._held().items()}
        return {"averages": averages, "num_updates": self.num_updates}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take averages that `state_dict` gave, on this mesh, or whole as `gather` makes them.

        Raises:
            SpecError: names or shapes that are not those of the model.
        """
        held, given = self._held(), state["averages"]
        wrong = [f"{name}: missing" for name in held if name not in given]
        wrong += [f"{name}: not in the model" for name in given if name not in held]
        wrong += [
            f"{name}: {tuple(given[name].shape)} for {tuple(x.shape)}"
            for name, x in held.items()
            if name in given and given[name].shape != x.shape
        ]
        if wrong:
            needs, fix = "the names and shapes of the model", "load what was averaged over the same model"
            raise SpecError(explain("EMA: the state does not fit.", got=wrong[:8], needs=needs, fix=fix))
        for name, x in held.items():
            self.averages[name].copy_(_piece(_laid_as(x, given[name])))
        self.num_updates = state["num_updates"]


def _piece(x: Tensor) -> Tensor:
    return x.to_local().detach() if isinstance(x, DTensor) else x.detach()


def _laid_as(x: Tensor, value: Tensor) -> Tensor:
    """Lay an average out as a tensor of the model."""
    if isinstance(x, DTensor) and isinstance(value, DTensor):
        alike = (x.device_mesh, x.placements) == (value.device_mesh, value.placements)
        return value if alike else cut_as(whole_of(value), x)
    return cut_as(value, x) if isinstance(x, DTensor) else whole_of(value)
