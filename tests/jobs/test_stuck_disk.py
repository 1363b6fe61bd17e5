"""A disk that does not answer is named, with the rank that waits for it; one that is only slow is waited for."""

import re

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
