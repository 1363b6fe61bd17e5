"""What a binding needs of the engine: attachments, single gradients, assigned values, units without a name."""

import contextlib

import numpy as np
import pytest

import zerort as zr
from zerort.engine import Attachment
from zerort.errors import CallError, CollectiveError, UnitStateError
from zerort.testing.threads import run_threads


def ones(*shape):
    return np.ones(shape, np.float32)


class Recorder(Attachment):
    def __init__(self, unit=None):
        self.unit = unit
        self.heard = []

    def complete(self, verb):
        self.heard.append(verb)
        if self.unit is not None:
            self.unit.reduce()

    def forget(self):
        self.heard.append("forget")


def test_attachments_are_asked_before_a_step_and_told_after_it():
    with zr.open(plan=zr.Plan.zero(3)) as rt:
        unit = rt.register("a", {"w": ones(4)})
        recorder = Recorder(unit)
        rt.attachments.append(recorder)
        unit.add("w", ones(4))
        assert rt.step().updated  # which the attachment has reduced
        assert recorder.heard == ["step", "forget"]
        recorder.unit = None
        with pytest.raises(UnitStateError, match="got none since the last one"):
            rt.step()
        rt.discard_gradients()
        assert recorder.heard == ["step", "forget", "step", "forget", "discard", "forget"]


def test_every_verb_runs_within_what_attachments_want(tmp_path):
    class Around(Attachment):
        inside = 0
        seen = ()

        @contextlib.contextmanager
        def around(self):
            self.inside += 1
            yield
            self.inside -= 1

        def values(self, *, loading=False):
            self.seen += (self.inside,)
            return ()

    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=1.0)) as rt:
        rt.register("a", {"w": ones(4)})
        feed = rt.publish(tmp_path / "feed")
        around = Around()
        rt.attachments.append(around)  # after the feed was made: it counts all the same
        for verb in (lambda: rt.save(tmp_path / "c"), lambda: rt.load(tmp_path / "c"), feed.push):
            around.seen = ()
            verb()
            assert around.seen
            assert set(around.seen) == {1}
        assert around.inside == 0


def test_an_interrupt_in_a_push_breaks_the_group(tmp_path):
    """As in every verb: nobody can say how far it came, so nobody goes on from there, nor waits (decision 0073)."""

    class Interrupted(Attachment):
        def values(self, *, loading=False):
            raise KeyboardInterrupt

    with zr.open_group(kind="solo") as group:
        rt = zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=1.0), group=group)
        rt.register("a", {"w": ones(4)})
        feed = rt.publish(tmp_path / "feed")
        rt.attachments.append(Interrupted())
        with pytest.raises(KeyboardInterrupt):
            feed.push()
        rt.attachments.clear()
        for verb in (feed.push, lambda: rt.save(tmp_path / "c")):
            with pytest.raises(CollectiveError, match=r"KeyboardInterrupt.* push\(\)"):
                verb()
        rt.__exit__(CollectiveError, None, None)


@pytest.mark.parametrize("plan", [0, 1, 2, 3])
def test_assigned_values_are_every_ranks_and_the_masters(plan):
    def body(group):
        with zr.open(plan=zr.Plan.zero(plan), optimizer=zr.SGD(lr=1.0), group=group) as rt:
            half = ones(5).astype("bfloat16")
            unit = rt.register("a", {"w": half, "v": half + half})
            other = rt.register("b", {"f": ones(3)}, ties={"w": (unit, "w")}, frozen=["f"])
            other.assign({"w": half * 4, "f": ones(3) * 7})
            unit.assign({"v": half * (5 + group.rank)}, broadcast=True)  # rank 0's
            gradients = {"w": half, "v": half}
            other.reduce()
            unit.reduce(gradients)
            rt.step()
            with unit.gathered() as p, other.gathered() as q:
                assert (p["w"] == 3).all()
                assert (q["w"] == 3).all()
                assert (p["v"] == 4).all()
                assert (q["f"] == 7).all()

    run_threads(3, body)


def test_assigning_keeps_the_precision_of_other_masters():
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=2.0**-10)) as rt:
        half = ones(4).astype("bfloat16")
        unit = rt.register("a", {"w": half, "v": half.copy()})
        for _ in range(8):  # each too small for bfloat16 alone
            unit.reduce({"w": half, "v": half})
            rt.step()
            unit.assign({"v": half})
        with unit.gathered() as p:
            assert (p["w"] < 1).all()
            assert (p["v"] == 1).all()


def test_what_cannot_be_assigned_is_refused_on_every_rank():
    def body(group):
        with zr.open(group=group) as rt:
            unit = rt.register("a", {"w": ones(4)})
            odd = group.rank == 1
            for value, text in [
                ({"v": ones(4)}, "Expected one of 'w' of unit 'a'; got 'v'"),
                ({"w": ones(3 + odd)}, r"as float32\[4\], got float32\[3\]"),
                ({"w": ones(4).tolist()}, "got list"),
                ({"w": ones(4) * group.rank}, "Expected the same .*values of unit 'a'.*rank 1"),
                ({"w": ones(4)} if odd else {}, "what is assigned to be the same"),
            ]:
                with pytest.raises(CallError, match=text):
                    unit.assign(value)
            with unit.gathered(), pytest.raises(UnitStateError, match="released before assign"):
                unit.assign({"w": ones(4)})
            unit.assign({"w": ones(4) * 2})

    run_threads(2, body)


def test_a_unit_without_a_name_adds_none_to_its_tensors():
    groups = [zr.ParameterGroup("head.weight", lr=0.5)]
    with zr.open(optimizer=zr.SGD(lr=1.0), param_groups=groups) as rt:
        unit = rt.register("", {"head.weight": ones(2), "v": ones(2)})
        unit.reduce({"head.weight": ones(2), "v": ones(2)})
        rt.step()
        with unit.gathered() as p:
            assert (p["head.weight"] == 0.5).all()
            assert (p["v"] == 0).all()
        assert {extent.name for section in unit.sections for extent in section.layout.extents} == {"head.weight", "v"}
