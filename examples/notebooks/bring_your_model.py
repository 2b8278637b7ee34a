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
# # Bring your model
#
# A model that was written for one device, on several ranks, without an edit. First we check that it is the same
# function there; then we train it, and compare the loss curves.
#
# To run it: `pip install "meshpar[notebook]"`.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import meshpar

# %% [markdown]
# ## A model
#
# Nothing in it knows of ranks: it pads in longitude, reads `x.shape`, reshapes, and attends over all grid points. Put
# your own in its place.


# %%
class Block(nn.Module):
    """A convolution that is periodic in longitude, and a norm."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.norm = nn.GroupNorm(4, out_channels)

    def forward(self, x):
        x = F.pad(x, (1, 1, 0, 0), mode="circular")
        x = F.pad(x, (0, 0, 1, 1))
        return F.silu(self.norm(self.conv(x)))


class Forecast(nn.Module):
    """The next field from the last one: a convolutional encoder and decoder with attention in between."""

    def __init__(self, channels=3, width=16):
        super().__init__()
        self.encode = Block(channels, width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.decode = Block(2 * width, width)
        self.head = nn.Conv2d(width, channels, 1)

    def forward(self, x):
        fine = self.encode(x)
        coarse = F.avg_pool2d(fine, 2)
        tokens = coarse.flatten(2).transpose(1, 2)
        tokens = tokens + self.attend(tokens, tokens, tokens, need_weights=False)[0]
        coarse = tokens.transpose(1, 2).reshape(coarse.shape)
        coarse = F.interpolate(coarse, size=fine.shape[-2:], mode="bilinear")
        return x + self.head(self.decode(torch.cat([fine, coarse], dim=1)))


torch.manual_seed(0)
net = Forecast().double()
x = torch.randn(2, 3, 37, 48, dtype=torch.float64)

# %% [markdown]
# ## Is it the same function?
#
# One step on each mesh, and the same step on one process. In float64 only the order of sums is left to differ, so a
# real fault cannot hide behind rounding. Outputs, loss and all gradients are compared. With rows and columns cut, the
# attention gathers: its tokens lie along two axes, and for that there is no rule. It is right all the same, and said.

# %%
for mesh in ("domain=2", "domain=4", "data=2,domain=2", "domain=2,domain_w=2"):
    run = meshpar.simulate(mesh, net, x)
    gathers = ", ".join(run.gathers()) or "none"
    print(f"{mesh:22s} {run.difference:.1e} from one process; gathers: {gathers}")
    assert run.difference < 1e-10

# %% [markdown]
# ## What does it cost?
#
# The tables of a step. Attention looks at all grid points: the ranks exchange heads (`sdpa (heads)`), which is more
# than the rows that a convolution sends.

# %%
run = meshpar.simulate("domain=4", net, x)
run

# %%
sent = {}
for row in run.ranks[1].explanation.rows:
    name = row.where or "(root)"
    sent[name] = sent.get(name, 0) + row.forward_bytes + row.backward_bytes
sent = {name: num_bytes for name, num_bytes in sent.items() if num_bytes}
fig, ax = plt.subplots(figsize=(6, 0.4 * len(sent) + 1))
ax.barh(list(sent), [num_bytes / 1e3 for num_bytes in sent.values()], color="#4477aa")
ax.invert_yaxis()
ax.set_xlabel("KB that rank 1 of 4 sends in a step")
plt.show()

# %% [markdown]
# ## A tensor axis
#
# `tensor_plan="auto"` finds the layers whose weights can be split over `tensor`. Any plan gives the same numbers.

# %%
run = meshpar.simulate("domain=2,tensor=2", net, x, tensor_plan="auto")
print(f"{run.difference:.1e} from one process")
print(run.ranks[0].parameters["attend.in_proj_weight"])
assert run.difference < 1e-10

# %% [markdown]
# ## Training
#
# This function is a training script: with `mesh = meshpar.make_mesh(...)` above it, it runs under `torchrun` as it is.
# Each data rank loads its own samples. Without a mesh it trains on one process, on the samples of all data ranks.


# %%
def batch(step, num=4):
    """Waves, and where they are a moment later."""
    generator = torch.Generator().manual_seed(step)
    y = torch.linspace(0, torch.pi, 37, dtype=torch.float64).view(1, 1, 37, 1)
    x = torch.linspace(0, 2 * torch.pi, 49, dtype=torch.float64)[:-1]
    phase = 2 * torch.pi * torch.rand(num, 3, 1, 1, dtype=torch.float64, generator=generator)
    return torch.sin(y) * torch.sin(2 * x + phase), torch.sin(y) * torch.sin(2 * x + phase - 0.5)


def train(mesh, net, num_steps):
    model = net if mesh is None else meshpar.parallelize(net, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(num_steps):
        x, y = batch(step)
        if mesh is None:
            loss = F.mse_loss(model(x), y)
        else:
            num = len(x) // meshpar.axis_size(mesh, "data")
            own = slice(meshpar.coordinate(mesh, "data") * num, (meshpar.coordinate(mesh, "data") + 1) * num)
            with meshpar.spmd():
                loss = F.mse_loss(model(x[own]), meshpar.shard_batch(y[own], mesh))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() if mesh is None else meshpar.gather(loss).item())
    return losses


on_ranks = meshpar.simulate("data=2,domain=2").run(train, net, 20)[0]
alone = train(None, net, 20)
apart = max(abs(a - b) / b for a, b in zip(on_ranks, alone, strict=True))
print(f"the curves are {apart:.1e} apart")
assert apart < 1e-9

# %%
fig, ax = plt.subplots(figsize=(6, 3))
ax.plot(alone, color="#bbbbbb", linewidth=5, label="one process")
ax.plot(on_ranks, color="#4477aa", linewidth=1.5, label="data=2, domain=2")
ax.set(xlabel="step", ylabel="loss", yscale="log", xticks=range(0, 20, 5))
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Next
#
# - Put `train` into a script with `mesh = meshpar.make_mesh("data=2,domain=2")`, and start it with
#   `torchrun --nproc-per-node 4 script.py`.
# - `plan_a_mesh.py`: which mesh to ask for.
# - `property_test.py`: check your model on sizes that you would not think of.
