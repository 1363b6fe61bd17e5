"""Several backward passes per step: each is reduced into the shards when it ends, or all of them at the step."""

import pytest
import torch
from models import GPT, Branching, text
from training import make

import zerort as zr
import zerort_torch as zt
from zerort.errors import UnitStateError

pytestmark = pytest.mark.mpi


class TwoLosses(torch.nn.Module):
    """Two halves that take turns, as a GAN's do."""

    def __init__(self):
        super().__init__()
        self.halves = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))

    def forward(self, at, x):
        return self.halves[at](x).square().mean()


def opened(group, **options):
    return zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), group=group, **options)


def reduced(report):
    return report.bytes_moved.get("reduce_scatter", 0)


def test_units_that_no_rank_used_in_a_micro_step_move_nothing_in_it(group):
    with opened(group, micro_steps=4) as rt:
        model = zt.shard(make(TwoLosses), rt, units=torch.nn.Linear)
        x = torch.ones(4, 64)
        each = sum(section.layout.nbytes for section in rt.units.sections()) // 2
        before = {name: value.clone() for name, value in zt.full_state_dict(model).items()}
        for step in range(3):
            for at in (0, 1, 1, 1):
                model(at, x).backward()
            report = rt.step()
            # In the first step nobody knows yet which units a micro-step uses.
            assert step == 0 or rt.size == 1 or reduced(report) == 4 * each
        after = zt.full_state_dict(model)
        assert all((value != before[name]).any() for name, value in after.items())


@pytest.mark.parametrize("accumulate", ["sharded", "local"])
def test_branches_that_differ_between_ranks_and_micro_steps(node, accumulate):
    """The same batches in another order: the gradients of a step are the same sums, but for their order."""

    def weights(order):
        with opened(node, micro_steps=3, accumulate=accumulate) as rt:
            model = zt.shard(make(Branching).double(), rt)
            for step in range(3):
                for at in order:
                    x, y = text(6, 10 * step + at)
                    x[:, 0] = (rt.rank + at) % 3
                    model(x, y).backward()
                rt.step()
            return zt.full_state_dict(model)

    found, expected = weights((0, 1, 2)), weights((2, 0, 1))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def test_gradients_do_not_take_more_memory_with_more_micro_steps(group):
    def gradient(micro_steps):
        with opened(group, micro_steps=micro_steps) as rt:
            model = zt.shard(make(GPT), rt)
            for step in range(micro_steps):
                model(*text(2, step)).backward()
            rt.step()
            return rt.memory().gradient

    assert gradient(4) == gradient(1)


def test_discarded_backward_passes_leave_nothing_behind(group):
    with opened(group, micro_steps=3) as rt:
        model = zt.shard(make(GPT), rt)
        for step in range(3):
            model(*text(2, step)).backward()
        once = reduced(rt.step())
        model(*text(2, 3)).backward()
        assert reduced_so_far(rt) == once // 3
        rt.discard_gradients()
        moved = reduced_so_far(rt)
        assert moved == 2 * (once // 3)  # one more: another rank might be in a backward that this one did not make
        for step in range(3):
            model(*text(2, step)).backward()
        assert reduced(rt.step()) == once + moved  # the ledger goes from step to step


@pytest.mark.parametrize("accumulate", ["sharded", "local"])
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_discard_different_numbers_of_backward_passes(group, stage, accumulate):
    """Rank 0 has made one, rank 1 none, rank 2 three: none of them waits for a pass that another one did not make."""

    def weights(*, discards):
        options = {"optimizer": zr.SGD(lr=0.1), "group": group, "accumulate": accumulate}
        with zr.open(plan=zr.Plan.zero(stage), micro_steps=3, **options) as rt:
            model = zt.shard(make(GPT).double(), rt)
            for step in range(2):
                if discards:
                    with zt.gathered(model):
                        for _ in range((1, 0, 3, 0)[(rt.rank + step) % 4]):
                            model(*text(2, 50 + rt.rank)).backward()
                    rt.discard_gradients()
                for at in range(3):
                    model(*text(2, 3 * step + at)).backward()
                rt.step()
            return zt.full_state_dict(model)

    found, expected = weights(discards=True), weights(discards=False)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def reduced_so_far(rt):
    return rt.context.ledger.moved["reduce_scatter"]


def test_reentrant_checkpointing_is_refused_where_ranks_agree_in_every_backward(group):
    with opened(group, micro_steps=2) as rt:
        model = zt.shard(make(lambda: GPT(recompute=True)), rt)
        with pytest.raises(UnitStateError, match=r"got one inside another: reentrant .* use_reentrant=False"):
            model(*text(2, 0)).backward()


@pytest.mark.parametrize("accumulate", ["sharded", "local"])
def test_too_few_micro_steps_are_refused_and_dropped_with_torch_and_without(group, accumulate):
    """One rule for both: nothing is updated, and the next step begins anew."""
    with opened(group, micro_steps=3, accumulate=accumulate) as rt:
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 3, bias=False).double()
        unit = rt.register("plain", {"w": layer.weight.detach().numpy().copy()})
        model = zt.shard(layer, rt, name="torch")
        x = torch.ones(2, 4, dtype=torch.float64)
        gradient = {"w": torch.full((3, 4), 2.0, dtype=torch.float64).numpy()}  # of a sum over two rows of ones

        def weights():
            with unit.gathered() as views:
                return torch.from_numpy(views["w"].copy()), zt.full_state_dict(model, root=None)["weight"]

        def pass_both(passes):
            for _ in range(passes):
                unit.reduce(gradient)
                model(x).sum().backward()

        before = weights()
        for too_few, match in [
            (lambda: unit.reduce(gradient) or unit.reduce(gradient), r"Expected 3 reduce\(\) of .*discard_gradients"),
            (lambda: model(x).sum().backward(), r"Expected 3 backward\(\) before step\(\), got 1.*discard_gradients"),
        ]:
            too_few()
            with pytest.raises(UnitStateError, match=match):
                rt.step()
            assert all(torch.equal(one, other) for one, other in zip(weights(), before, strict=True))
        pass_both(3)
        assert rt.step().updated
        by_hand, by_torch = weights()
        assert torch.equal(by_hand, by_torch)
        torch.testing.assert_close(by_hand, before[0] - 0.1 * 2.0, rtol=1e-12, atol=1e-12)
