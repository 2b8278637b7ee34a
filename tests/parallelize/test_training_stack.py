"""30 steps of AdamW under every mode of the data axis, with and without tensor plans and checkpointing.

The parameters are those of one process, and whatever lies on several ranks has the same bits on all of them.
"""

import copy
import hashlib

import nets
import pytest
import tensor_nets
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import meshpar
from meshpar.testing import run_ranks
from meshpar.testing.meshes import mesh_for

STEPS = 30
UNET_PLAN = {"down.*.conv": "colwise", "middle.conv": "rowwise", "up.1.conv": "colwise", "head": "rowwise"}
MODELS = {
    "transformer": (tensor_nets.Transformer, tensor_nets.TRANSFORMER_PLAN),
    "unet": (nets.UNet, UNET_PLAN),
}
MESHES = {
    ("fsdp", 1): "data=2,domain=2",
    ("ddp", 1): "data=2,domain=2",
    ("hsdp", 1): "replica=2,data=1,domain=2",
    ("fsdp", 2): "data=1,domain=2,tensor=2",
    ("ddp", 2): "data=1,domain=2,tensor=2",
    ("hsdp", 2): "replica=2,data=1,domain=1,tensor=2",
}


def batch(name, step):
    """Make one batch of inputs and targets, the same in every process."""
    draw = torch.Generator().manual_seed(step)
    if name == "transformer":
        tokens = torch.randint(0, 12, (4, 6), generator=draw)
        return tokens, torch.randn(4, 6, 12, generator=draw, dtype=torch.float64)
    pair = torch.randn(2, 4, 2, 11, 8, generator=draw, dtype=torch.float64)
    return pair[0], pair[1][:, :1]


def train(model, name, place):
    """Train a model; `place` brings a batch to where it lives."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x, y = (place(part) for part in batch(name, step))
        with meshpar.spmd():
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(meshpar.gather(loss.detach())))
    return losses


def held(model):
    """Tell what this rank holds of each parameter: which part of it, and a digest of its bits."""
    told = {}
    for name, p in model.named_parameters():
        part = ()
        if isinstance(p, DTensor):
            at = zip(p.device_mesh.mesh_dim_names, p.device_mesh.get_coordinate(), p.placements, strict=True)
            part = tuple((axis, where) for axis, where, placement in at if not placement.is_replicate())
        piece = p.detach().to_local() if isinstance(p, DTensor) else p.detach()
        told[name] = part, hashlib.sha256(piece.contiguous().numpy().tobytes()).hexdigest()
    return told


def trained(name, mode, spec, plan, checkpoint):
    make = MODELS[name][0]
    torch.manual_seed(0)
    alone = make().double()
    mesh = mesh_for(spec)
    options = {"data": mode, "tensor_plan": plan, "checkpoint": checkpoint, "on_gather": "allow"}
    parallel = meshpar.parallelize(copy.deepcopy(alone), mesh, **options)
    expected = train(alone, name, lambda t: t)
    found = train(parallel, name, lambda t: meshpar.shard(t, mesh))
    state = {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in parallel.state_dict().items()
    }
    assert list(state) == list(alone.state_dict())
    error = max(float((state[key] - value).abs().max()) for key, value in alone.state_dict().items())
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held(parallel))
    bits = {}
    for told in everyone:
        for key, (part, digest) in told.items():
            bits.setdefault((key, part), set()).add(digest)
    copies = len(everyone) * len(state) - len(bits)
    torn = [key for key, digests in bits.items() if len(digests) > 1]
    return error, max(abs(a - b) for a, b in zip(found, expected, strict=True)), torn, copies


@pytest.mark.parametrize("checkpoint", [None, "blocks"])
@pytest.mark.parametrize("num_tensor", [1, 2])
@pytest.mark.parametrize("mode", ["fsdp", "ddp", "hsdp"])
@pytest.mark.parametrize("name", MODELS)
def test_thirty_steps_are_those_of_one_process(name, mode, num_tensor, checkpoint):
    plan = MODELS[name][1] if num_tensor > 1 else None
    for error, loss_error, torn, copies in run_ranks(
        trained, 4, name, mode, MESHES[mode, num_tensor], plan, checkpoint, timeout_s=120.0
    ):
        assert error < 1e-8
        assert loss_error < 1e-8
        assert torn == [], "ranks that hold the same part of a parameter hold the same bits"
        assert copies > 0 or (mode == "fsdp" and num_tensor == 1)
