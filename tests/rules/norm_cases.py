"""One norm, checked against one process."""

import pytest
import torch
import torch.nn.functional as F

from meshpar.batch import shard
from meshpar.scope import spmd
from meshpar.testing.equivalence import assert_same, compare_trees
from meshpar.testing.meshes import mesh_for

RANKS = {"data=1,domain=4": 4, "data=2,domain=2": 4, "data=4": 4, "data=1,domain=3": 3, "data=1,domain=2": 2}
CROSSED = "data=1,domain=2,tensor=2"
LAYOUTS = {3: "data _ domain", 4: "data _ domain _", 5: "data _ domain _ _"}


def numbers(shape, seed=0, dtype=torch.float64, mean=0.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + mean).to(dtype)


def weights_of(shape, num, dtype=torch.float64):
    return [numbers(shape, seed, dtype) + (1 if seed == 1 else 0) for seed in range(1, num + 1)]


def check_norm(spec, kind, shape, given, layout, num_weights, seed, form=None):
    """Compare a norm on a mesh with one process; return what the record says."""
    mesh = mesh_for(spec)
    x = numbers(shape, seed)
    if form == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    try:
        expected_error = None
        _call(kind, x, *weights_of(_weight_shape(kind, shape, given), num_weights), given=given, shape=shape)
    except (ValueError, RuntimeError) as error:
        expected_error = type(error)

    buffers = []

    def fn(x, *weights):
        return _call(kind, x, *weights, given=given, shape=shape, buffers=buffers)

    weights = weights_of(_weight_shape(kind, shape, given), num_weights)
    if expected_error is not None:
        with pytest.raises(expected_error), spmd(on_gather="error"):
            fn(shard(x, mesh, layout), *weights)
        return None
    report = assert_same(fn, [x], mesh=mesh, layouts=[layout], weights=weights)
    if buffers:
        (mean, var), (own_mean, own_var) = buffers
        compare_trees("running statistics", (own_mean, own_var), (mean, var), 1e-12)
        assert bit_equal(own_mean)
        assert bit_equal(own_var)
    return [(e.kind, e.axis, e.num_bytes, e.backward) for e in report.log.entries]


def bit_equal(x):
    everyone = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, x)
    return all(torch.equal(x, other) for other in everyone)


def _weight_shape(kind, shape, given):
    return shape[-given["dims"] :] if kind in ("layer", "rms") else (shape[1],)


_BUFFERS = {num: (numbers((num,), 7), numbers((num,), 8).abs()) for num in range(1, 10)}


def _call(kind, x, *weights, given, shape, buffers=None):
    w, b = (*weights, None, None)[:2]
    match kind:
        case "group":
            return F.group_norm(x, given["groups"], w, b, given["eps"])
        case "layer":
            return F.layer_norm(x, shape[-given["dims"] :], w, b, given["eps"])
        case "rms":
            return F.rms_norm(x, list(shape[-given["dims"] :]), w, given["eps"])
    pair = [None, None]
    if given["tracked"]:
        pair = [t.clone() for t in _BUFFERS[shape[1]]]
    out = (F.batch_norm if kind == "batch" else F.instance_norm)(
        x, *pair, w, b, given["training"], given["momentum"], given["eps"]
    )
    if given["tracked"] and given["training"] and buffers is not None:
        buffers.append(pair)
    return out
