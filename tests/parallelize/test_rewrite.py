"""`rewrite` copies structure, keeps identity, and leaves the module that it was given alone."""

import copy
import functools
import re

import nets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import meshpar
from meshpar.testing import run_ranks

LEAVES = st.sampled_from(
    [
        lambda: nn.Conv2d(2, 2, 3, padding=1),
        lambda: nn.Conv1d(2, 2, 1),
        lambda: nn.GroupNorm(1, 2),
        lambda: nn.BatchNorm2d(2),
        lambda: nn.Identity(),
        lambda: nn.LSTM(2, 3),
        lambda: nets.spectral(old=True),
        lambda: nets.spectral(old=False),
        nets.weight_normed,
        nets.Tied,
        lambda: nets.PeriodicConv2d(2, 2, 3),
    ]
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda kind, parts: lambda: kind([part() for part in parts]),
        st.sampled_from(
            [lambda ms: nn.Sequential(*ms), nn.ModuleList, lambda ms: nn.ModuleDict(dict(zip("abc", ms, strict=False)))]
        ),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=6,
)


def picture(module: nn.Module) -> list[object]:
    """List all that a module is made of, by identity."""
    out: list[object] = []
    for name, m in module.named_modules():
        out.append((name, id(m), type(m)))
        for key, value in sorted(m.__dict__.items()):
            inner = [(k, id(v)) for k, v in value.items()] if isinstance(value, dict) else None
            listed = [id(v) for v in value] if isinstance(value, list) else None
            out.append((key, id(value), inner, listed))
    return out


@given(TREES)
@settings(max_examples=60, deadline=None)
def test_input_is_untouched_and_the_copy_has_the_same_tensors_and_names(make):
    module = make()
    before = picture(module)
    values = {k: v.clone() for k, v in module.state_dict().items()}
    new = meshpar.rewrite(module)
    assert picture(module) == before
    assert [(n, id(p)) for n, p in module.named_parameters()] == [(n, id(p)) for n, p in new.named_parameters()]
    assert [(n, id(b)) for n, b in module.named_buffers()] == [(n, id(b)) for n, b in new.named_buffers()]
    assert list(new.state_dict()) == list(values)
    assert [n for n, _ in new.named_modules()] == [n for n, _ in module.named_modules()]
    olds = {id(m) for m in module.modules()}
    assert not [m for m in new.modules() if id(m) in olds]
    for old, twin in zip(module.modules(), new.modules(), strict=True):
        assert isinstance(twin, type(old))


def test_ties_shared_modules_and_unregistered_references_are_kept():
    new = meshpar.rewrite(nets.Tied())
    assert new.first.weight is new.second.weight
    assert new.blocks[0] is new.first
    assert new.unregistered[0] is new.first
    assert new.again.__self__ is new.first


def test_a_rewritten_model_still_runs_on_plain_tensors():
    torch.manual_seed(0)
    for make in (nets.Tied, nets.UNet, nets.BatchNormNet, functools.partial(nets.spectral, old=True)):
        module = make().double()
        twin = meshpar.rewrite(copy.deepcopy(module) if make is not nets.Tied else module)
        x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
        assert torch.equal(module(x), twin(x))


def test_print_shows_what_each_layer_does():
    text = repr(
        meshpar.rewrite(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(2, 64), nn.BatchNorm2d(64)))
    )
    assert "DomainConv2d(64, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), rows=1+1 on domain)" in text
    assert re.search(r"DomainGroupNorm\(2, 64, .*statistics over domain\)", text)
    assert "statistics over data, domain" in text


def test_only_exact_types_are_swapped():
    new = meshpar.rewrite(nn.Sequential(nets.PeriodicConv2d(2, 2, 3)))
    assert type(new[0]).__name__ == "PeriodicConv2d"
    assert isinstance(new[0], nets.PeriodicConv2d)


def test_compiled_modules_are_refused_by_name():
    with pytest.warns(DeprecationWarning, match=r"jit\.script"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(meshpar.SpecError, match=r"torch\.jit modules: 1"):
        meshpar.rewrite(nn.Sequential(nn.Identity(), scripted))


class Calls:
    """Count the calls of hooks; importable, so that ranks can make it."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def pre(self, module, args):
        self.seen.append(f"pre {type(module).__name__}")

    def post(self, module, args, output):
        self.seen.append("post")
        return output * 2

    def back(self, module, grad_in, grad_out):
        self.seen.append("back")


def hooked() -> tuple[list[str], list[str], bool]:
    from meshpar.testing import mesh_for

    torch.manual_seed(0)
    calls = Calls()
    net = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 1))
    net[0].register_forward_pre_hook(calls.pre)
    net[0].register_forward_hook(calls.post)
    net[0].register_full_backward_hook(calls.back)
    net[1].register_state_dict_post_hook(lambda module, state, prefix, _: calls.seen.append("state"))
    parallel = meshpar.parallelize(net, mesh_for("domain=2"))
    x = torch.randn(1, 1, 5, 4)
    y = parallel(x)
    meshpar.gather(y).sum().backward()
    parallel.state_dict()
    parallel_seen = list(calls.seen)
    calls.seen.clear()
    z = net(x)
    z.sum().backward()
    net.state_dict()
    with torch.no_grad():
        same = torch.allclose(meshpar.gather(y), z)
    return parallel_seen, list(calls.seen), same


def test_hooks_fire_on_the_copy_as_on_the_original():
    for parallel_seen, plain_seen, same in run_ranks(hooked, 2):
        assert [s.replace("FSDP", "").replace("Domain", "") for s in parallel_seen] == plain_seen
        assert plain_seen == ["pre Conv2d", "post", "back", "state"]
        assert same
