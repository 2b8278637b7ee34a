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
# # Explore placements
#
# A *mesh* gives each process (a *rank*) a place along named axes. `data` shares out the samples of a batch, `domain`
# the rows of each sample, `tensor` the channels of a layer. This notebook looks at who holds what, on ranks that it
# starts itself. A CPU is enough; no launcher is needed.
#
# To run it: `pip install "meshpar[notebook]"`.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import meshpar

# %% [markdown]
# ## A grid over four ranks
#
# 37 rows do not divide by 4. The first ranks take ten rows each, the last one has the seven that are left. `show` draws
# this for any mesh and shape, and needs no ranks for it. The dashed lines bound the rows that a 3 × 3 convolution
# needs: its own, and one of each neighbour.

# %%
picture = meshpar.show("data=1,domain=4", (1, 1, 37, 49), halo=1)
print(picture)
picture

# %% [markdown]
# With two data ranks there are two such grids, one for each half of the batch:

# %%
meshpar.show("data=2,domain=2", (4, 1, 37, 49))

# %% [markdown]
# ## The same on real ranks
#
# `simulate` without a model gives the ranks of a mesh. They are processes of this machine, and they stay for the next
# cell. `run` calls a function on each of them, with the mesh in front. A tensor that is shared out comes back as the
# pieces that the ranks hold.

# %%
y = torch.linspace(0, torch.pi, 37).view(1, 1, 37, 1)
x = torch.linspace(0, 2 * torch.pi, 50)[:-1]
field = torch.sin(y) * torch.sin(2 * x + 3 * y)


def cut(mesh, x):
    print(f"rows of the domain axis are shared out over {meshpar.axis_size(mesh, 'domain')} ranks")
    return meshpar.shard(x, mesh)


ranks = meshpar.simulate("domain=4")
pieces = ranks.run(cut, field)
for piece in pieces:
    print(piece)

# %%
heights = [piece.values.shape[-2] for piece in pieces]
fig, axes = plt.subplots(4, 1, figsize=(5, 5), height_ratios=heights)
for ax, piece in zip(axes, pieces, strict=True):
    ax.imshow(piece.values[0, 0], vmin=-1, vmax=1, cmap="RdBu_r", aspect="auto")
    ax.set(xticks=[], yticks=[], ylabel=f"rank {piece.rank}")
fig.suptitle("one field, as four ranks hold it")
plt.show()

# %% [markdown]
# ## A step of a model
#
# With a model and its input, `simulate` runs a forward and a backward on the ranks, and the same step on one process.
# The tables say what each rank holds and what it sends; the line below says how far the two are apart.
#
# - A convolution sends a row to each neighbour; the ranks at the poles have one neighbour only. In the backward the
#   gradients of those rows go home, but not here: the input of this one needs none.
# - A norm sends its sums: a few numbers for each group.
# - The activation sends nothing, and so is not in the table.

# %%
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 1, 1)).double()
run = meshpar.simulate("domain=4", net, field.double())
print(f"largest difference from one process: {run.difference:.1e}")
assert run.difference < 1e-12
run

# %% [markdown]
# Everything in it can be taken out: the gathered output, the gradients of the parameters, the pieces of each rank. The
# parameters are shared out as well. FSDP cuts them along their first dim, over all ranks of data × domain.

# %%
print("output ", tuple(run.output.shape), "gathered;", run.ranks[3].output)
print("weight ", tuple(run.gradients["0.weight"].shape), "gathered;", run.ranks[3].parameters["0.weight"])
print("rank 1 sent", run.ranks[1].num_bytes, "bytes")

# %% [markdown]
# ## What gathers
#
# What has no rule is still right, but it is gathered, and said. A median of all numbers needs all numbers; its row is
# marked, with the bytes that it costs.


# %%
class LessMedian(nn.Module):
    def forward(self, x):
        return x - torch.median(x)


run = meshpar.simulate("domain=4", nn.Sequential(net, LessMedian()), field.double())
print(run.gathers())
assert run.difference < 1e-12
run

# %% [markdown]
# ## Rows and columns
#
# `domain_w` cuts the columns (longitude). Corners come right, too.

# %%
run = meshpar.simulate("domain=2,domain_w=2", net, field.double())
assert run.difference < 1e-12
run

# %% [markdown]
# The processes end with this kernel. To end them now:

# %%
ranks.close()
