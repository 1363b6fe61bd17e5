"""Ranks of one machine find out whether they see each other, also where a kernel tells less than usual."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import seams

from zerort.comm.neighbours import are_crowded, cpu_quotas, see_each_other, share_cores


@pytest.mark.parametrize(
    ("spaces", "seen"),
    [
        (("pid:[1]", "pid:[1]"), True),
        (("pid:[1]", "pid:[2]"), False),
        (("unknown, of process 7", "unknown, of process 8"), False),  # /proc/self/ns cannot be read
    ],
)
def test_ranks_see_each_other_in_one_process_space(spaces, seen):
    def tell(mine):
        return [mine, mine if mine in ("yes", "no") else f"{spaces[1]},{os.getpid()}"]

    with seams.inside(see_each_other, process_space=lambda: spaces[0]):
        assert see_each_other(tell) is seen


@pytest.mark.parametrize(
    ("cores", "crowded"),
    [
        ([{0, 1}, {0, 1}], False),
        ([{0}, {1}, {2}, {3}], False),  # each bound to its own: as many as there are ranks, not as each sees
        ([{0, 1}, {0}, {1}], True),
        ([{0, 1}, {0}], False),  # the first moves on to 1
        ([{0, 1}, {1, 2}, {0}, {1}], True),
        ([{0}, {0}, {1, 2, 3}], True),  # enough cores in all, but two ranks bound to one
    ],
)
def test_ranks_are_crowded_where_not_each_can_have_a_core(cores, crowded):
    assert are_crowded(cores, [{}] * len(cores)) is crowded


def test_ranks_are_crowded_by_a_quota_that_they_share():
    cores = [{0, 1, 2, 3}] * 3
    assert are_crowded(cores, [{"a": 2.0}] * 3) is True
    assert are_crowded(cores, [{"a": 3.0}] * 3) is False
    assert are_crowded(cores, [{"a": 1.0}, {"b": 1.0}, {"c": 1.0}]) is False  # containers of their own
    assert are_crowded(cores, [{"a": 0.5}, {}, {}]) is True


@pytest.mark.parametrize(("counting", "crowded"), [(2, False), (3, True)])
def test_cores_are_shared_by_ranks_that_count(counting, crowded, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    everyone = ThreadPoolExecutor(6)
    met, told = threading.Barrier(6), {}

    def find(rank):
        def tell(text):
            told[rank] = text
            met.wait(60)
            return [told[rank] for rank in range(6)]

        return share_cores(tell, counts=rank < counting)

    with seams.inside(share_cores, cpu_quotas=dict), everyone:
        assert list(everyone.map(find, range(6))) == [crowded] * 6


def test_quotas_are_read_up_to_the_root_of_control_groups(tmp_path):
    inner = tmp_path / "cgroup/job/step"
    inner.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/job/step\n")
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert list(cpu_quotas(tmp_path / "cgroup", tmp_path / "own").values()) == [1.5]
    (tmp_path / "cgroup/cpu.max").write_text("400000 100000\n")
    assert sorted(cpu_quotas(tmp_path / "cgroup", tmp_path / "own").values()) == [1.5, 4.0]


def test_quotas_of_version_1_are_read(tmp_path):
    group = tmp_path / "cgroup/cpu,cpuacct/job"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("5:memory:/job\n4:cpu,cpuacct:/job\n")
    (group / "cpu.cfs_quota_us").write_text("50000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert list(cpu_quotas(tmp_path / "cgroup", tmp_path / "own").values()) == [0.5]
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quotas(tmp_path / "cgroup", tmp_path / "own") == {}
    assert cpu_quotas(tmp_path / "cgroup", tmp_path / "nothing") == {}
