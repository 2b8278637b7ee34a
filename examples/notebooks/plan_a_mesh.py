# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Plan a mesh
#
# Before there is a machine: what each rank will hold and send, on meshes that are larger than this laptop. `plan` runs
# the step of a rank on tensors without values, in this process. At the end we hold a small plan against real ranks.
#
# To run it: `pip install "meshpar[notebook]"`.

# %%
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import meshpar

# %% [markdown]
# ## The model
#
# A U-Net for 70 fields on a grid of 721 × 1440 (a quarter of a degree).


# %%
def block(in_channels, out_channels):
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
    return nn.Sequential(conv, nn.GroupNorm(8, out_channels), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, channels, width, depth=2):
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.stem = block(channels, width)
        self.down = nn.ModuleList(block(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(block(a + b, a) for a, b in pairwise(widths))
        self.head = nn.Conv2d(width, channels, 1)

    def forward(self, x):
        skips = [self.stem(x)]
        for down in self.down:
            skips.append(down(F.avg_pool2d(skips[-1], 2)))
        y = skips.pop()
        for up in reversed(self.up):
            skip = skips.pop()
            y = up(torch.cat([skip, F.interpolate(y, size=skip.shape[-2:], mode="bilinear")], dim=1))
        return x + self.head(y)


net = UNet(70, 64)
shape = (1, 70, 721, 1440)
print(f"{sum(p.numel() for p in net.parameters()) / 1e6:.1f} million parameters")

# %% [markdown]
# ## One mesh
#
# The shape is what one data rank gives to the model: one sample, all of its rows. Bytes are counted, not modelled: they
# are those of the step itself. Seconds are estimates, at rates that `rates=` changes.

# %%
plan = meshpar.plan(net, "data=8,domain=8", shape)
plan

# %% [markdown]
# ## Which meshes fit?
#
# 8 devices of 16 GB, and four samples for each data rank. The meshes that fit come first, the quickest (by the
# estimate) on top.

# %%
found = meshpar.search(net, (4, *shape[1:]), devices=8, memory="16GB")
print(found)
print("take", found.best.spec)

# %% [markdown]
# ## What does the domain axis buy?
#
# The same plans, by the number of ranks that share a sample: peak memory of the rank that needs the most, and what the
# rank that sends the most sends.

# %%
plans = {plan.spec.domain: plan for plan in sorted(found.plans, key=lambda plan: plan.spec.domain)}
peaks = [plan.peak_bytes / 1e9 for plan in plans.values()]
for n, plan in plans.items():
    sent = plan.num_bytes(axis="domain") / 1e6
    print(f"domain={n:<3d} {plan.peak_bytes / 1e9:6.2f} GB at the peak, {sent:6.1f} MB sent over domain in a step")

fig, ax = plt.subplots(figsize=(6, 3))
ax.plot(list(plans), peaks, "o-", color="#4477aa", label="peak of a rank")
ax.plot(list(plans), [peaks[0] / n for n in plans], ":", color="#888888", label="that of one rank, divided")
ax.set(xscale="log", yscale="log", xlabel="ranks of the domain axis", ylabel="GB")
ax.minorticks_off()
ax.set_xticks(list(plans), [str(n) for n in plans])
ax.set_yticks([2.5, 5, 10, 20], ["2.5", "5", "10", "20"])
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# The memory shrinks with the ranks. What a rank sends is bounded: it has two neighbours at the most, and sends each a
# few rows, for every layer that looks at neighbours. The line ends above the dotted one, since each rank is given its
# samples whole here, which is 1.16 GB; a loader that reads a rank's own rows (`shard_batch(..., rows="local")`) spares
# that.

# %% [markdown]
# Activation checkpointing is another way to make it fit. It needs no more ranks, but computes each forward twice:

# %%
planned = meshpar.plan(net, plans[4].spec, (4, *shape[1:]), checkpoint="all")
without, with_it = plans[4].peak_bytes / 1e9, planned.peak_bytes / 1e9
print(f"{with_it:.2f} GB on the rank that needs the most, in place of {without:.2f} GB")

# %% [markdown]
# ## Is a plan right?
#
# A narrow net on a coarse grid fits this machine; so we run the step on real ranks and count what they send. The counts
# are equal, to the byte.

# %%
small = UNet(3, 8)
coarse = (1, 3, 46, 90)
planned = meshpar.plan(small, "domain=4", coarse, world=4)
run = meshpar.simulate("domain=4", small, torch.randn(coarse))
for rank, on_plan in planned.ranks.items():
    expected = sum(entry.num_bytes for entry in on_plan.entries)
    measured = run.ranks[rank].num_bytes
    print(f"rank {rank}: planned {expected} bytes, sent {measured}")
    assert expected == measured

# %% [markdown]
# The same from a shell, for a model that can be imported:
#
# ```sh
# python -m meshpar plan package.module:factory --input 1,70,721,1440 --mesh data=8,domain=8
# ```
