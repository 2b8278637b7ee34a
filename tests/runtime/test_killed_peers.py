"""A rank that is killed in forward, backward or save of a training run: the others end with an error that names it.

Under `parallelize`, with halos, statistics, `fully_shard` and its copies; 10 runs each, at drawn moments.
"""

import re

import killing
import pytest
from programs import played


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return played(killing.__file__, tmp_path_factory.mktemp("killed"), timeout_s=1200)[0]


NAMED = re.compile(
    r"(?m)^(?P<where>\S+): (?P<op>.+) lost a peer on axis (?P<axis>[\w ]+)\.$"
    r"|^(?P<asked>\S+): not all ranks came\.\n.*axis (?P<mesh>\w+)"
    r"|^(?P<save>save_checkpoint): .*\n.*no answer of a rank"
)
AXES = {"data", "domain", "data_domain", "replica", "shard", "mesh"}


@pytest.mark.parametrize("scene", killing.SCENES)
def test_the_others_end_in_time_with_an_error_that_names_it(scene, seen):
    assert len(seen["runs"][scene]) == killing.NUM_RUNS
    in_save = [any(name == "CheckpointError" for name, _, _ in run["seen"].values()) for run in seen["runs"][scene]]
    assert sum(in_save) >= 5 if scene == "save" else sum(in_save) <= 5, "a moment may be the last one of its phase"
    for run in seen["runs"][scene]:
        assert run["hung"] == []
        num_ranks = 3 if run["way"][0] == "domain=3" else 4
        assert set(run["seen"]) == {str(rank) for rank in range(num_ranks) if rank != run["victim"]}
        alone = []
        for name, text, seconds in run["seen"].values():
            told = NAMED.search(text)
            assert told, text
            assert name == ("CheckpointError" if told["save"] else "PeerError")
            assert told["save"] or set((told["axis"] or told["mesh"]).split(" or ")) <= AXES, text
            gone = [int(rank) for rank in re.search(r"gone: global rank\(s\) \[([\d, ]+)\]", text)[1].split(",")]
            assert run["victim"] in gone
            alone.append(gone == [run["victim"]])
            assert 0 <= seconds < killing.TIMEOUT_S
        assert any(alone), "the first to see it names it alone; who comes later may name those that have ended, too"


def test_what_was_saved_before_is_still_there(seen):
    for run in seen["runs"]["save"]:
        assert run["saved"][-1] >= 2


def test_no_process_and_no_segment_is_left(seen):
    assert seen["segments"] == []
    assert seen["processes"] == []
