"""What a plan may say, how a model shows it, and state dicts of models under one."""

import pytest
import tensor_nets as nets
import torch
from test_tensor import CASES, SPLIT, whole_state
from torch import nn

import meshpar
from meshpar.errors import SpecError
from meshpar.tensor import plan_splits
from meshpar.testing import RankError, run_ranks
from meshpar.testing.meshes import mesh_for, ranks_of


def plan_of_one_word():
    meshpar.parallelize(nn.Linear(2, 2), mesh_for("data=1"), tensor_plan="best")


def test_a_wrong_plan_is_one_error_with_all_that_is_wrong():
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 7), nn.Conv2d(4, 4, 3, groups=2), nn.Linear(5, 9))
    plan = {
        "0": "colwise",
        "1": "colwise",
        "2": "colwise",
        "3": "rowwise",
        "4": "packed",
        "fc*": "colwise",
        "*": "sideways",
    }
    with pytest.raises(SpecError) as error:
        plan_splits(model, {key: value for key, value in plan.items() if key != "*"}, 4)
    text = str(error.value)
    assert "10 out channels are not shared out equally by 4 ranks" in text
    assert "a GELU has no style 'colwise'" in text
    assert "7 out channels are not shared out equally by 4 ranks" in text
    assert "its 2 groups of channels cannot be split by rows" in text
    assert "9 channels out of 5 do not tell how many parts" in text
    assert "'fc*' matches no module" in text
    with pytest.raises(SpecError, match="unknown style 'sideways'"):
        plan_splits(model, {"*": "sideways"}, 2)
    with pytest.raises(SpecError, match="a list"):
        plan_splits(model, ["0"], 2)
    with pytest.raises(RankError, match="tensor_plan='best'"):
        run_ranks(plan_of_one_word, 1)


def test_ties_must_be_split_alike():
    with pytest.raises(SpecError, match="one parameter, split in different ways"):
        plan_splits(nets.Transformer(tied=True), {"head": "rowwise", "embed": "rowwise"}, 2)


def test_the_last_glob_that_matches_holds():
    splits = plan_splits(nets.Transformer(), {"blocks.*.fc?": "colwise", "blocks.1.mlp.fc1": "replicate"}, 2)
    assert set(splits) == {"blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "blocks.1.mlp.fc2"}


def shown(mesh):
    model = meshpar.parallelize(nets.Mlp(), mesh_for(mesh), tensor_plan={"fc1": "colwise", "fc2": "rowwise"})
    pieces = {name: tuple(p.to_local().shape) for name, p in model.named_parameters() if hasattr(p, "to_local")}
    return str(model), pieces


def test_the_model_shows_its_plan_and_each_rank_holds_its_share():
    text, pieces = run_ranks(shown, 2, "data=1,tensor=2")[0]
    assert "fc1): Linear(in_features=8, out_features=16, bias=True, colwise over tensor)" in text
    assert pieces == {"fc1.weight": (8, 8), "fc1.bias": (8,), "fc2.weight": (8, 8)}


def loaded(mesh, state):
    torch.manual_seed(5)
    model = meshpar.parallelize(nets.ConvNet(), mesh_for(mesh), tensor_plan=CASES["columns then rows"][2])
    model.load_state_dict(state)
    return whole_state(model)


@pytest.mark.parametrize("mesh", SPLIT)
def test_a_state_dict_of_one_process_loads_into_a_split_model(mesh):
    torch.manual_seed(6)
    state = nets.ConvNet().state_dict()
    for found in run_ranks(loaded, ranks_of(mesh), mesh, state):
        assert list(found) == list(state)
        assert all(torch.equal(found[name], value) for name, value in state.items())
