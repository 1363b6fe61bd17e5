"""How long messages between hosts are waited for."""

import types

import pytest
from mpi4py import MPI

from zerort.comm.transports.messages import exchange
from zerort.comm.transports.messages.exchange import Exchange, Interrupted


class Rounds:
    """Rounds of which one is done at every so many looks, a second each."""

    is_long, until, done, looks = True, 0, 0, 0

    def __init__(self, clock, every):
        self._clock, self._every = clock, every

    def wait(self, seconds, busy):
        self._clock[0] += 1.0
        self.looks += 1
        self.done += self.looks % self._every == 0
        return self.done >= self.until


@pytest.mark.parametrize(("every", "arrives"), [(3, True), (5, False)])
def test_the_timeout_is_for_one_round_however_many_there_are(every, arrives, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(exchange, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    one = Exchange(MPI.COMM_SELF, hosts=[0], message_nbytes=1024, timeout=3.5)
    rounds = Rounds(clock, every)
    if arrives:
        one.follow(rounds, 10, sequence=0)
        assert (rounds.done, rounds.looks) == (10, 30)
    else:
        with pytest.raises(Interrupted):
            one.follow(rounds, 10, sequence=0)
        assert rounds.looks < every
