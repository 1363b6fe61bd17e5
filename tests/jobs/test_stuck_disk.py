"""A disk that does not answer is named, with the rank that waits for it; one that is only slow is waited for."""

import re

import pytest

from zerort.checkpoint import verify

SAVE = """
import time
from zerort.checkpoint.save import save
from zerort.checkpoint import Value
from zerort.layout import FlatLayout, Partition
layout = FlatLayout.build({"w": (300, 1000)})
group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=10.0))
partition = Partition.build(layout.numel, group.size)
mine = np.ones(partition.counts[group.rank], np.float32)
values = [Value(kind="parameter", layout=layout, partition=partition, mine=mine)]
path = sys.argv[1]
"""


def test_a_write_that_never_returns_names_its_rank_and_file(job, tmp_path):
    code = (
        SAVE
        + """
if group.rank == 1:
    os.pwritev = lambda *words: time.sleep(1000)
try:
    save(path, group, values, meta={})
except StorageError as error:
    say("rank", group.rank, "raised", error)
group.close()
"""
    )
    result = job(3, code, args=[tmp_path / "c"])
    assert result.code == 0, result.output
    raised = re.findall(r"rank (\d) raised (.*)", result.output)
    assert sorted(rank for rank, _ in raised) == ["0", "1", "2"], result.output
    for _, text in raised:
        assert re.search(rf"got none on rank 1, which is at: write {tmp_path}/c/\S*0*1\S*", text), text
        assert "(rank" not in text


def test_slow_deletes_after_a_save_are_waited_for(job, tmp_path):
    """Each takes a fraction of the timeout, and all of them longer: the save counts already, and nobody breaks."""
    code = (
        SAVE
        + """
save(path, group, values, meta={})
real = os.unlink
def slow(*words, **options):
    time.sleep(4.0)
    real(*words, **options)
if group.rank == 0:
    os.unlink = slow
saved = save(path, group, values, meta={})
say("rank", group.rank, "deleted", len(saved.removed))
group.close()
"""
    )
    result = job(3, code, args=[tmp_path / "c"])
    assert result.code == 0, result.output
    assert re.findall(r"rank \d deleted (\d+)", result.output) == ["3"] * 3, result.output
    assert verify(tmp_path / "c") == []


HANG = """
def never_open(part):
    real = os.open
    def hang(path, *words, **options):
        if part in os.fspath(path):
            time.sleep(1000)
        return real(path, *words, **options)
    os.open = hang
"""


@pytest.mark.parametrize(("rank", "part"), [(1, "shard-"), (2, "manifest.json")], ids=["data", "manifest"])
def test_a_file_that_cannot_be_opened_to_load_names_its_rank_and_path(job, tmp_path, rank, part):
    code = (
        SAVE
        + HANG
        + """
from zerort.checkpoint import load
save(path, group, values, meta={})
if group.rank == int(sys.argv[2]):
    never_open(sys.argv[3])
try:
    load(path, group, values)
except StorageError as error:
    say("rank", group.rank, "raised", error)
group.close()
"""
    )
    result = job(3, code, args=[tmp_path / "c", rank, part])
    assert result.code == 0, result.output
    raised = re.findall(r"rank (\d) raised (.*)", result.output)
    assert sorted(one for one, _ in raised) == ["0", "1", "2"], result.output
    at = re.escape(f"got none on rank {rank}, which is at: open {tmp_path}/c/{part}")
    assert all(re.search(at, text) for _, text in raised), result.output


def test_a_lease_that_cannot_be_looked_at_before_a_step_names_its_rank_and_path(job, tmp_path):
    code = (
        HANG
        + """
options = zr.GroupOptions.from_environment(timeout=10.0)
with zr.open_group(options=options) as group, zr.open(group=group, last_step=sys.argv[1]) as rt:
    unit = rt.register("unit", {"w": np.zeros(1000, np.float32)})
    for number in range(2):
        if number == 1 and group.rank == 0:
            never_open("saver.lease")
        with unit.gathered():
            pass
        unit.reduce({"w": np.ones(1000, np.float32)})
        try:
            rt.step()
        except StorageError as error:
            say("rank", group.rank, "raised in step", number, error)
    say("rank", group.rank, "did", rt.updates)
"""
    )
    result = job(2, code, args=[tmp_path / "c"])
    assert result.code == 0, result.output
    raised = re.findall(r"rank (\d) raised in step 1 (.*)", result.output)
    assert sorted(one for one, _ in raised) == ["0", "1"], result.output
    assert all(f"got none on rank 0, which is at: open {tmp_path}/c/saver.lease" in text for _, text in raised)
    assert result.output.count("did 1") == 2, result.output
    assert verify(tmp_path / "c") == []
