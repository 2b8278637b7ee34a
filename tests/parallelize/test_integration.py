"""What users put around a parallel model: autocast, inference_mode, functional_call, copies, pickles, hooks."""

import copy
import io
import pickle

import nets
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import meshpar
from meshpar.testing import mesh_for, run_ranks

MESHES = ("data=1,domain=4", "data=2,domain=2")


def pair(spec: str, make, dtype=torch.float64):
    """Give a parallel model and the same one on one process."""
    mesh = mesh_for(spec)
    torch.manual_seed(0)
    reference = make().to(dtype)
    return mesh, meshpar.parallelize(reference, mesh, on_gather="error"), reference


def batch(mesh, shape=(4, 2, 13, 6), dtype=torch.float64):
    """Give a global batch and this data rank's part of it."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    num, index = meshpar.axis_size(mesh, "data"), meshpar.coordinate(mesh, "data")
    return x, x.chunk(num)[index]


def distance(found, expected) -> float:
    return float((meshpar.gather(found) - expected).detach().abs().max() / expected.detach().abs().max())


def autocast(spec: str) -> None:
    mesh, model, reference = pair(spec, nets.UNet, torch.float32)
    x, own = batch(mesh, dtype=torch.float32)
    seen: list[list[torch.dtype]] = [[], []]
    for kept, m in zip(seen, (model, reference), strict=True):
        for part in m.modules():
            if not list(part.children()):
                part.register_forward_hook(lambda _m, _a, out, kept=kept: kept.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = model(own), reference(x)
    assert seen[0] == seen[1]
    assert torch.bfloat16 in seen[0]
    assert found.dtype == expected.dtype
    assert distance(found.float(), expected.float()) < 2**-5
    with meshpar.spmd():
        found.float().square().mean().backward()
    expected.float().square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad.dtype == theirs.grad.dtype
        scale = theirs.grad.abs().max()
        assert float((meshpar.gather(ours.grad) - theirs.grad).abs().max()) < 2**-4 * max(float(scale), 1e-2)


@pytest.mark.parametrize("mesh", MESHES)
def test_autocast_gives_the_dtypes_of_one_process_and_its_numbers(mesh):
    run_ranks(autocast, 4, mesh)


def without_gradients(spec: str, make) -> None:
    mesh, model, reference = pair(spec, make)
    x, own = batch(mesh)
    for context in (torch.no_grad, torch.inference_mode):
        for train in (True, False):
            model.train(train)
            reference.train(train)
            with context():
                found, expected = model(own), reference(x)
                assert not found.requires_grad
                assert found.is_inference() == expected.is_inference()
                assert distance(found, expected) < 1e-12
    # and a step with gradients goes on as if nothing had been
    model.train()
    reference.train()
    with meshpar.spmd():
        model(own).square().mean().backward()
    reference(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert float((meshpar.gather(ours.grad) - theirs.grad).abs().max()) < 1e-12


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("make", [nets.UNet, nets.BatchNormNet])
def test_no_grad_and_inference_mode(make, mesh):
    run_ranks(without_gradients, 4, mesh, make)


def replaced(spec: str) -> None:
    """Other values in the place of parameters: all, some, the model's own, whole or sharded."""
    mesh, model, reference = pair(spec, nets.UNet)
    x, own = batch(mesh)
    names = list(dict(reference.named_parameters()))
    generator = torch.Generator().manual_seed(7)
    other = {k: torch.randn(p.shape, generator=generator, dtype=p.dtype) for k, p in reference.named_parameters()}
    for chosen in (names, names[:1], [k for k in names if k.startswith("up.0")]):
        ours = {k: other[k].clone().requires_grad_() for k in chosen}
        theirs = {k: other[k].clone().requires_grad_() for k in chosen}
        found = torch.func.functional_call(model, ours, own)
        expected = torch.func.functional_call(reference, theirs, x)
        assert distance(found, expected) < 1e-12
        with meshpar.spmd():
            loss = found.square().mean()
        loss.backward()
        expected.square().mean().backward()
        for k in chosen:
            assert float((ours[k].grad - theirs[k].grad).abs().max()) < 1e-11 * max(
                float(theirs[k].grad.abs().max()), 1
            )
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                assert float((meshpar.gather(p.grad) - q.grad).abs().max()) < 1e-11 * max(float(q.grad.abs().max()), 1)
        model.zero_grad()
        reference.zero_grad()
    # the model's own parameters, and sharded ones made from them
    mine = dict(model.named_parameters())
    assert distance(torch.func.functional_call(model, mine, own), reference(x)) < 1e-12
    halves = {k: p.detach() / 2 for k, p in mine.items()}
    expected = torch.func.functional_call(reference, {k: p / 2 for k, p in reference.named_parameters()}, x)
    assert distance(torch.func.functional_call(model, halves, own), expected) < 1e-12
    # the model is as it was
    assert all(p is q for p, q in zip(model.parameters(), mine.values(), strict=True))
    assert distance(model(own), reference(x)) < 1e-12


@pytest.mark.parametrize("mesh", MESHES)
def test_functional_call(mesh):
    run_ranks(replaced, 4, mesh)


def copied(spec: str) -> None:
    mesh = mesh_for(spec)
    net = nets.Tied().double()
    x = torch.randn(4, 2, 5, 6, dtype=torch.float64)
    dist.broadcast(x, 0)
    own = x.chunk(meshpar.axis_size(mesh, "data"))[meshpar.coordinate(mesh, "data")]
    twin = copy.deepcopy(net)
    model = meshpar.parallelize(twin, mesh)
    state = meshpar.gather(model.state_dict())
    file = io.BytesIO()
    torch.save(state, file)
    for again in (pickle.loads(pickle.dumps(state)), torch.load(io.BytesIO(file.getvalue()))):
        net.load_state_dict(again)
        assert distance(model(own), net(x)) < 1e-12
        fresh = meshpar.parallelize(nets.Tied().double(), mesh)
        fresh.load_state_dict(again)
        assert distance(fresh(own), net(x)) < 1e-12
    assert copy.deepcopy(twin).state_dict().keys() == state.keys()


@pytest.mark.parametrize("mesh", MESHES)
def test_a_copy_before_and_a_pickle_of_the_state_after(mesh):
    run_ranks(copied, 4, mesh)


def hooked(spec: str) -> None:
    mesh, model, reference = pair(spec, nets.UNet)
    x, own = batch(mesh)
    seen: list[dict[str, tuple[int, ...]]] = [{}, {}]
    grads: list[dict[str, torch.Tensor]] = [{}, {}]
    for shapes, found, m in zip(seen, grads, (model, reference), strict=True):
        m.register_forward_pre_hook(lambda _m, args, shapes=shapes: shapes.update({"input": tuple(args[0].shape)}))
        m.middle.conv.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
        m.middle.register_forward_hook(lambda _m, _args, out: F.softplus(out))
        m.head.register_forward_hook(lambda _m, _a, out, shapes=shapes: shapes.update({"head": tuple(out.shape)}))
        m.middle.norm.register_full_backward_hook(
            lambda _m, gin, gout, found=found: found.update({"in": gin[0], "out": gout[0]})
        )
        m.head.register_full_backward_pre_hook(lambda _m, gout: (gout[0] * 3,))
    y, expected = model(own), reference(x)
    assert distance(y, expected) < 1e-12
    assert seen[0]["head"] == seen[1]["head"]
    with meshpar.spmd():
        loss = y.square().mean()
    loss.backward()
    expected.square().mean().backward()
    for k, g in grads[1].items():
        assert tuple(grads[0][k].shape) == tuple(g.shape)
        assert distance(grads[0][k], g) < 1e-11
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert float((meshpar.gather(ours.grad) - theirs.grad).abs().max()) < 1e-11


@pytest.mark.parametrize("mesh", MESHES)
def test_hooks_see_and_change_what_they_would_on_one_process(mesh):
    """Module hooks get activations of global shape: a hook on the root alone sees the call as it was made."""
    run_ranks(hooked, 4, mesh)


def tensor_hooks(spec: str) -> None:
    mesh = mesh_for(spec)
    reference = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.SiLU(), nn.Conv2d(3, 1, 3, padding=1)).double()
    model = meshpar.parallelize(reference, mesh)
    reference.load_state_dict(meshpar.gather(model.state_dict()))
    x, own = batch(mesh)
    for m in (model, reference):
        m[1].register_forward_hook(lambda _m, _a, out: out.register_hook(lambda g: g * 2) and None)
    with meshpar.spmd():
        model(own).square().mean().backward()
    reference(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert float((meshpar.gather(ours.grad) - theirs.grad).abs().max()) < 1e-11


@pytest.mark.parametrize("mesh", MESHES)
def test_hooks_on_tensors(mesh):
    run_ranks(tensor_hooks, 4, mesh)
