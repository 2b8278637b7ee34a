"""Messages between the ranks of one axis.

Invariant: sends and receives are never posted in turns: NCCL is given all sends before all receives in one batch, gloo
all receives before all sends. One message a peer; peers are ranks of the axis's own group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar import record
from meshpar.errors import PeerError
from meshpar.peers import peer_text, who_is_gone


def room_for(x: Tensor, dim: int, rows: int) -> Tensor:
    """Make room for a message: as x, with `rows` rows along a dim, contiguous."""
    shape = list(x.shape)
    shape[dim] = rows
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def packed(x: Tensor) -> Tensor:
    """Give a tensor as a message: contiguous, with conjugates and negatives worked out."""
    return x.contiguous().resolve_conj().resolve_neg()


def as_bytes(message: Tensor) -> Tensor:
    """View a message as bytes: every backend sends those, whatever the dtype.

    Dims of one row may have any stride in a contiguous tensor, and a `view` as bytes would trip over it.
    """
    return message.as_strided((message.numel(),), (1,)).view(torch.uint8)


def exchange(
    messages: list[tuple[int, Tensor]],
    buffers: list[tuple[int, Tensor]],
    group: dist.ProcessGroup,
    axis: str,
    label: str,
    *,
    kind: str,
    backward: bool,
    meanwhile: Callable[[], None],
    num_rows: int = 0,
) -> None:
    """Post all sends and all receives; do `meanwhile` while they travel; wait.

    Args:
        messages: peer (rank of the group) and what to send it, contiguous; empty ones are left out.
        buffers: peer and what to receive from it.
        group: process group of the axis.
        axis: name of the axis, for errors and the record.
        label: what `record.here` gave in the forward pass.
        kind: kind of the communication, for the record.
        backward: whether this is the backward pass.
        meanwhile: what to do while the messages travel.
        num_rows: rows that are received, for the record.

    Raises:
        PeerError: a peer died, or did not come within the timeout of the group.
    """
    messages = [(peer, message) for peer, message in messages if message.numel()]
    buffers = [(peer, buffer) for peer, buffer in buffers if buffer.numel()]
    num_bytes = sum(message.numel() * message.element_size() for _, message in messages)
    record.note(label, kind, axis, num_bytes, num_messages=len(messages), backward=backward, num_rows=num_rows)
    sends = [dist.P2POp(dist.isend, as_bytes(m), group=group, group_peer=peer) for peer, m in messages]
    receives = [dist.P2POp(dist.irecv, as_bytes(b), group=group, group_peer=peer) for peer, b in buffers]
    on_cpu = all(op.tensor.device.type == "cpu" for op in (*sends, *receives))
    # A message of gloo that finds its room is written at once; one that does not waits for a thread on either side.
    ops = [*receives, *sends] if on_cpu else [*sends, *receives]
    peers = [op.group_peer for op in ops]
    batches = [[op] for op in ops] if on_cpu else [ops] if ops else []  # gloo: one by one, so that a fault has a name
    works: list[dist.Work] = []
    for batch in batches:
        try:
            works += dist.batch_isend_irecv(batch)
        except RuntimeError as error:
            waits = [peers[len(works)]] if on_cpu else peers
            raise PeerError(_peer_text(label, axis, group, peers, waits, error)) from error
    meanwhile()
    for i, work in enumerate(works):
        waits = [peers[i]] if len(works) == len(peers) else peers  # a backend may give one work for the whole batch
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerError(_peer_text(label, axis, group, peers, waits, error)) from error


def _peer_text(
    label: str, axis: str, group: dist.ProcessGroup, peers: Sequence[int], waits: Sequence[int], error: Exception
) -> str:
    ranks = dist.get_process_group_ranks(group)
    got = [
        f"rank {dist.get_rank()} exchanged rows with global rank(s) {[ranks[peer] for peer in sorted(set(peers))]}",
        f"it failed with global rank(s) {[ranks[peer] for peer in sorted(set(waits))]}",
        *who_is_gone(error),
    ]
    return peer_text(label, axis, got, error)
