"""Tensors of torch in collectives of `rt.group`, and losses in `rt.mean`."""

import numpy as np
import pytest
import torch

import zerort as zr
import zerort_torch as zt  # noqa: F401 (which has groups take tensors)
from zerort.errors import CallError

pytestmark = pytest.mark.mpi

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def ranks(group):
    return torch.arange(group.size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_new_tensors_of_the_same_kind(group, dtype):
    mine = torch.full((2, 3), group.rank + 1, dtype=dtype)
    total = int((ranks(group) + 1).sum())
    summed = group.all_reduce(mine).wait()
    assert torch.equal(summed, torch.full((2, 3), total, dtype=dtype))
    assert torch.equal(mine, torch.full((2, 3), group.rank + 1, dtype=dtype)), "the source is left alone"
    side = group.all_gather(mine).wait()
    assert torch.equal(side, (ranks(group) + 1).repeat_interleave(6).to(dtype))
    part = group.reduce_scatter(torch.arange(2 * group.size).to(dtype)).wait()
    assert torch.equal(part, group.size * torch.arange(2 * group.rank, 2 * group.rank + 2).to(dtype))
    assert summed.dtype is side.dtype is part.dtype is dtype


def test_tensors_are_written_where_they_lie(group):
    x = torch.full((4,), float(group.rank))
    address = x.data_ptr()
    assert group.broadcast(x, root=group.size - 1).wait() is x
    assert x.tolist() == [group.size - 1.0] * 4
    assert group.all_reduce(x, out=x).wait() is x
    assert (x.data_ptr(), x.tolist()) == (address, [group.size * (group.size - 1.0)] * 4)
    out = torch.zeros(group.size, dtype=torch.float64)
    array = group.all_gather(np.array([group.rank + 0.5]), out=out).wait()  # either may be an array
    assert array is out
    assert out.tolist() == [rank + 0.5 for rank in range(group.size)]


def test_the_same_line_takes_other_tensors_and_arrays(group):
    """A line that was called before is looked up: with tensors it must not find what an array left there."""
    for value in (np.ones(3), torch.ones(3), np.ones(3), torch.ones(3), torch.ones(3)):
        assert (group.all_reduce(value, name="mixed").wait() == group.size).all()
        assert type(group.all_reduce(value).wait()) is type(value)


def test_what_cannot_be_sent_is_refused_on_every_rank(group):
    for wrong, text in [
        (torch.ones(4, 2).t(), "Expected a contiguous source"),
        (torch.ones(2, device="meta"), "Expected a dense tensor of the host, got .* on meta"),
        (torch.eye(2).to_sparse(), "Expected a dense tensor of the host, got .*sparse"),
    ]:
        with pytest.raises(CallError, match=text):
            group.all_reduce(wrong if group.rank == group.size - 1 else torch.ones(2)).wait()
    assert group.all_reduce(torch.ones(1)).wait().item() == group.size


def test_losses_have_a_mean_with_their_graph_or_without(group):
    with zr.open(group=group) as rt:
        loss = torch.tensor(float(rt.rank), requires_grad=True) * 2
        assert rt.mean(loss) == rt.mean(loss.detach()) == rt.mean([loss]) == rt.mean(loss[None]) == rt.size - 1
        with pytest.raises(CallError, match="Expected numbers to take the mean of"):
            rt.mean(torch.ones(2, 2))
    with zr.open(group=group, micro_steps=2) as rt:
        assert rt.mean(torch.tensor([1.0, 3.0])) == 2.0
