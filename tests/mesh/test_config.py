"""A trainer's configuration, in the two forms that there are, says the mesh; what is not known is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import meshpar
from meshpar.config import DATA_MODES, Choice, read_config
from meshpar.errors import SpecError
from meshpar.spec import MeshSpec
from meshpar.testing import RankError, run_ranks


def new(**section) -> dict:
    return {"trainer": {"parallelism": section, "epochs": 3, "amp": False}, "model": {"type": "unet"}}


def old(mode, size=None) -> dict:
    return {
        "trainer": {"mode": mode, **({} if size is None else {"domain_parallel_size": size}), "train_batch_size": 1}
    }


@pytest.mark.parametrize(
    ("conf", "choice"),
    [
        (new(data="fsdp2", tensor=2, domain=4), Choice("fsdp", 4, 2)),
        (new(data="ddp"), Choice("ddp")),
        (new(data="none", domain=2), Choice("none", 2)),
        (new(data=None), Choice("none")),
        (new(domain=2), Choice("fsdp", 2)),
        (new(), Choice("fsdp")),
        (new(data="hsdp", replica=2)["trainer"], Choice("hsdp", replica=2)),
        (old("fsdp"), Choice("fsdp")),
        (old("fsdp2"), Choice("fsdp")),
        (old("ddp"), Choice("ddp")),
        (old("ddp", 1), Choice("ddp")),
        (old("domain_parallel", 4), Choice("ddp", 4)),
        (old("domain_parallel"), Choice("ddp", -1, 1, 1)),
        (old("fsdp+domain_parallel", 2), Choice("fsdp", 2)),
        (old("none"), Choice("none", 1, 1, 1)),
        (old(False), Choice("none", 1, 1, 1)),
        (old("fsdp+domain_parallel", 2)["trainer"], Choice("fsdp", 2)),
    ],
)
def test_both_forms_are_read(conf, choice):
    assert read_config(conf) == choice


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        (new(dta="ddp"), "trainer.parallelism.dta: did you mean data?"),
        (new(tensors=2, domian=2), "trainer.parallelism.domian: did you mean domain?"),
        (new(pipeline=2), "trainer.parallelism.pipeline"),
        (new(data="fdsp2"), "trainer.parallelism.data='fdsp2': did you mean fsdp2?"),
        (new(data="zero3"), "one of fsdp2, fsdp, ddp"),
        (new(data=True), "trainer.parallelism.data=True"),
        (new(tensor=0), "trainer.parallelism.tensor=0"),
        (new(domain="2"), "trainer.parallelism.domain='2'"),
        (new(domain=True), "trainer.parallelism.domain=True"),
        (new(domain=-1), "trainer.parallelism.domain=-1"),
        (old("fsdp+domain_paralel", 2), "did you mean fsdp+domain_parallel?"),
        (old("fsdp+domain_parallel"), "without domain_parallel_size"),
        (old("fsdp", 2), "domain_parallel_size=2 with mode='fsdp'"),
        (old("domain_parallel", 0), "trainer.domain_parallel_size=0"),
        ({"trainer": {"paralelism": {"data": "ddp"}}}, "trainer.paralelism: did you mean parallelism?"),
        ({"trainer": {"mode": "ddp", "domain_parallel_sizes": 2}}, "did you mean domain_parallel_size?"),
        ({"trainer": {"mode": "ddp", "parallelism": {}}}, "trainer.parallelism and trainer.mode"),
        ({"trainer": {"epochs": 3}}, "neither trainer.parallelism nor trainer.mode"),
        ({"trainer": {"epochs": 3}, "parallelism": {}}, "parallelism beside trainer"),
        ({"trainer": 3}, "trainer is a int"),
        ({"trainer": {"parallelism": "ddp"}}, "trainer.parallelism is a str"),
        (4, "the configuration is a int"),
    ],
)
def test_what_is_not_known_is_refused_with_the_nearest(conf, said):
    with pytest.raises(SpecError) as caught:
        MeshSpec.from_config(conf)
    text = str(caught.value)
    assert said in text
    assert all(word in text for word in ("got:", "needs:", "fix:"))


def test_other_keys_of_a_trainer_are_not_looked_at():
    trainer = {"parallelism": {}, "type": "era5", "model": 1, "moe": 2, "domain": [1], "modes": "train"}
    assert read_config({"trainer": trainer}) == Choice("fsdp")


SIZES = st.integers(1, 8)


@given(st.sampled_from(list(DATA_MODES)), SIZES, SIZES, SIZES)
def test_the_data_axis_is_what_is_left_of_the_world(data, left, domain, tensor):
    spec = MeshSpec.from_config(new(data=data, tensor=tensor, domain=domain))
    assert spec.resolve(left * domain * tensor).sizes() == {"data": left, "domain": domain, "tensor": tensor}


def test_a_world_that_does_not_divide_names_all_sizes_and_the_nearest():
    with pytest.raises(SpecError) as caught:
        MeshSpec.from_config(old("fsdp+domain_parallel", 3)).resolve(8)
    text = str(caught.value)
    for part in ("domain=3", "data=-1", "tensor=1", "the world has 8", "data=4,domain=2,tensor=1"):
        assert part in text


def made(conf, device=None, **options) -> tuple[dict[str, int], tuple[int, ...]]:
    model = meshpar.parallelize_from_config(conf, nn.Conv2d(1, 1, 3, padding=1), device, **options)
    sizes = dict(zip(meshpar.mesh_of(model).mesh_dim_names, meshpar.mesh_of(model).shape, strict=True))
    return sizes, tuple(model(torch.zeros(2, 1, 5, 4)).shape)


def test_a_model_is_made_parallel_by_a_configuration():
    answers = run_ranks(made, 4, new(data="fsdp2", domain=2), "cpu", on_gather="error")
    assert answers == [({"data": 2, "domain": 2, "tensor": 1}, (4, 1, 5, 4))] * 4
    assert (
        run_ranks(made, 2, old("fsdp+domain_parallel", 2))
        == [({"data": 1, "domain": 2, "tensor": 1}, (2, 1, 5, 4))] * 2
    )


@pytest.mark.parametrize(
    ("conf", "options", "said"),
    [
        (new(domain=3), {}, "the world has 2"),
        (old("none"), {}, "the world has 2"),
        (new(), {"data": "fsdp"}, "said twice"),
        (new(tenser=2), {}, "did you mean tensor"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(conf, options, said):
    with pytest.raises(RankError, match=said) as caught:
        run_ranks(made, 2, conf, **options)
    assert len(caught.value.exceptions) == 2
    assert all(isinstance(error, SpecError) for error in caught.value.exceptions.values())
