"""When gather slots are put in the order in which all ranks lease them."""

import numpy as np
import pytest

import zerort as zr
from zerort.testing.threads import run_threads
from zerort.testing.threads_transport import ThreadsTransport


@pytest.mark.parametrize("tier", [zr.Tier.DEVICE, zr.Tier.NVME])
@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1, 2)])
def test_slots_are_put_in_order_only_where_it_matters_which_a_rank_leases(tier, hosts, tmp_path, monkeypatch):
    """Where ranks share slots, or meet before one is written to: once in a step. Else never."""
    monkeypatch.setattr(ThreadsTransport, "one_memory", False)
    monkeypatch.setattr(ThreadsTransport, "memories", hosts)

    def body(group):
        with zr.open(zr.Plan.zero(3, parameter=tier), zr.SGD(lr=0.1), group=group, scratch=tmp_path) as rt:
            for name in "ab":
                rt.register(name, {"w": np.ones(50, np.float32)})
            slots, count = rt.context.slots.gathered, []
            monkeypatch.setattr(slots, "reorder", lambda: count.append(1))
            for _ in range(3):
                for unit in rt.units.values():
                    with unit.gathered():
                        pass
                    unit.reduce({"w": np.ones(50, np.float32)})
                rt.step()
            return len(count)

    is_shared = hosts == (0, 0, 1) or tier is zr.Tier.NVME
    assert run_threads(3, body) == [3 * is_shared] * 3
