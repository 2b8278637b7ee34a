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
# # A property test of your own model
#
# The promise is a property: *for all* grids and meshes, the model on ranks is the model on one process. Hypothesis
# draws grids and meshes, and looks for a counterexample; `simulate` runs each of them both ways. When one fails,
# Hypothesis gives the smallest one that does.
#
# To run it: `pip install "meshpar[notebook]"`.

# %%
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

import meshpar

# %% [markdown]
# ## The model
#
# Put your own in its place. In float64, and in `eval()` if it has dropout, whose masks differ from rank to rank.


# %%
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(2, 4, 5, padding=2, padding_mode="circular")
        self.norm = nn.BatchNorm2d(4)
        self.narrow = nn.Conv2d(4, 2, 3, padding=1, stride=2)

    def forward(self, x):
        y = F.gelu(self.norm(self.wide(x)))
        return F.interpolate(self.narrow(y), size=x.shape[-2:], mode="bilinear")


torch.manual_seed(0)
net = Net().double()

# %% [markdown]
# ## The property
#
# The sizes begin where sharding is hard: more ranks than rows, so that some hold nothing; fewer rows than a halo; odd
# batches. Circular padding of 2 needs two rows, so they begin at 2.

# %%
meshes = st.sampled_from(["domain=2", "domain=3", "data=2,domain=2", "domain=2,domain_w=2"])
grids = st.tuples(st.integers(1, 3), st.just(2), st.integers(2, 14), st.integers(2, 8))
seen = []


def check(net, mesh, shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
    run = meshpar.simulate(mesh, net, x.requires_grad_())
    worst = max(run.errors, key=run.errors.get)
    assert run.difference < 1e-9, f"{mesh}, {shape}: {worst} differs by {run.difference:.1e}"
    return run


@settings(max_examples=12, deadline=None, derandomize=True)
@given(mesh=meshes, shape=grids)
def test_net_is_the_same_on_ranks(mesh, shape):
    run = check(net, mesh, shape)
    seen.append((mesh, shape, run.difference))


test_net_is_the_same_on_ranks()
print(f"{len(seen)} examples held; the largest difference is {max(d for *_, d in seen):.1e}")
for mesh, shape, difference in seen[:5]:
    print(f"  {mesh:22s} {shape!s:15s} {difference:.1e}")

# %% [markdown]
# ## A fault, to see it found
#
# A test that has never failed proves little. This net takes the sharding into its own hands, and makes a mistake: it
# subtracts the mean of the rows that a rank holds, not of all rows.


# %%
class Faulty(Net):
    def forward(self, x):
        y = super().forward(x)
        if isinstance(y, DTensor):
            return y - y.to_local().mean()
        return y - y.mean()


torch.manual_seed(0)
faulty = Faulty().double()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(shape=grids)
def test_faulty_net(shape):
    check(faulty, "domain=2", shape)


try:
    test_faulty_net()
except AssertionError as error:
    print("found:", error)
else:
    raise RuntimeError("the fault was not found")

# %% [markdown]
# ## In a test suite
#
# `meshpar.testing.assert_equivalent(net, [x], "domain=4")` is the stricter check for files of tests: buffers, the names
# of the state dict, and that nothing gathers. `meshpar.testing.strategies` draws meshes, sizes and layers.
