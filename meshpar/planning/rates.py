"""How fast a machine is, as far as an estimate of time needs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Hold what a device and its links can do; by default about half of what the sheet of an H100 in a node says.

    Args:
        flops_per_s: floating point operations of matrix products and convolutions in the dtype of the step.
        memory_bytes_per_s: what the device reads and writes of its own memory.
        link_bytes_per_s: what a rank sends to another.
        latency_s: of a message or a collective.

    Example:
        >>> Rates(link_bytes_per_s=25e9).latency_s
        1e-05
    """

    flops_per_s: float = 200e12
    memory_bytes_per_s: float = 1.6e12
    link_bytes_per_s: float = 200e9
    latency_s: float = 1e-5

    def op_s(self, flops: float, num_bytes: float) -> float:
        """Estimate the seconds of an op: the longer of its arithmetic and its reads and writes."""
        return max(flops / self.flops_per_s, num_bytes / self.memory_bytes_per_s)

    def sending_s(self, num_bytes: float, num_messages: float) -> float:
        """Estimate the seconds of messages, one after the other."""
        return num_bytes / self.link_bytes_per_s + num_messages * self.latency_s
