"""Random runs against a model in plain NumPy: register, gather, reduce, step, save, load, reopen, and disks that fail.

Hypothesis draws the order of the verbs, the plan with its tiers, and on how many ranks (threads of this process) a run
goes on. The model knows nothing of shards, tiers or files: float64 arrays, AdamW's formula, a dict of saved copies.
"""

from __future__ import annotations

import copy
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import zerort as zr
from zerort.config import GroupOptions
from zerort.errors import CheckpointError, StorageError, UnitStateError, ZerortError
from zerort.storage.files.faults import injected
from zerort.testing.threads_transport import Meeting, ThreadsTransport

LR, BETAS, EPS, DECAY = 0.05, (0.9, 0.99), 0.1, 0.1  # with a small eps nobody would notice gradients of another scale
OFFLOAD = zr.OffloadOptions(chunk_nbytes=8192, threads=1, retries=0)
SHAPES = [(3,), (7, 5), (1500,), (40, 41)]
NVME = zr.Tier.NVME
PLANS = [
    zr.Plan.zero(0),
    zr.Plan.zero(1),
    zr.Plan.zero(3),
    zr.Plan.zero(2, state=NVME),
    zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME),
]


class Ranks:
    """Threads that each hold one rank of a group, and do one thing at a time, together."""

    def __init__(self, size: int) -> None:
        self.size = size
        meeting, options = Meeting(size), GroupOptions(timeout=30.0)
        self.groups = [zr.Group(ThreadsTransport(meeting, at, name="threads", options=options)) for at in range(size)]
        self._work: list[queue.Queue[Callable[[int], Any] | None]] = [queue.Queue() for _ in range(size)]
        self._done: queue.Queue[tuple[int, Any]] = queue.Queue()
        self._threads = [threading.Thread(target=self._serve, args=(at,), daemon=True) for at in range(size)]
        for thread in self._threads:
            thread.start()

    def _serve(self, rank: int) -> None:
        while (body := self._work[rank].get()) is not None:
            self._done.put((rank, _outcome(body, rank)))

    def do(self, body: Callable[[int], Any]) -> list[Any]:
        """Call ``body(rank)`` on every rank at once; return what each returned or raised."""
        for work in self._work:
            work.put(body)
        results = dict(self._done.get(timeout=60.0) for _ in range(self.size))
        return [results[rank] for rank in range(self.size)]

    def all(self, body: Callable[[int], Any]) -> list[Any]:
        """Call ``body(rank)`` on every rank at once; raise what any rank raised."""
        results = self.do(body)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def refused(self, body: Callable[[int], Any], kind: type[ZerortError], match: str) -> None:
        """Expect that every rank raises the same kind of error."""
        for result in self.do(body):
            with pytest.raises(kind, match=match):
                raise result if isinstance(result, Exception) else AssertionError(f"returned {result!r}")

    def close(self) -> None:
        self.do(lambda rank: self.groups[rank].close())
        for work, thread in zip(self._work, self._threads, strict=True):
            work.put(None)
            thread.join(30.0)


def _outcome(body: Callable[[int], Any], rank: int) -> Any:
    try:
        return body(rank)
    except Exception as error:
        return error


def _have_failed(results: list[Any]) -> bool:
    """Say whether a disk refused what the ranks did: all of them, or none."""
    failed = [result for result in results if isinstance(result, Exception)]
    assert len(failed) in (0, len(results)), results
    assert all(isinstance(error, StorageError) for error in failed), failed
    return bool(failed)


@dataclass
class Tensor:
    """A parameter of the model, with what AdamW keeps of it."""

    value: np.ndarray[Any, np.dtype[np.float64]]
    first: Any = 0.0
    second: Any = 0.0
    steps: int = 0

    def update(self, gradient: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        self.steps += 1
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * gradient
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * gradient**2
        mean, square = self.first / (1 - BETAS[0] ** self.steps), self.second / (1 - BETAS[1] ** self.steps)
        self.value = self.value * (1 - LR * DECAY) - LR * mean / (np.sqrt(square) + EPS)


@dataclass
class Model:
    """What a run should hold."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    updates: int = 0


class Runs(RuleBasedStateMachine):
    """One run at a time; the model of it; the checkpoints it has written."""

    compared = 0
    """Units whose values were compared, in all runs."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="zerort-runs-"))
        self.model = Model()
        self.saved: dict[str, Model] = {}
        self.gradients: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}
        self.number = 0
        self.ranks: Ranks | None = None

    # -- opening ---------------------------------------------------------------------------------------------------

    @initialize(plan=st.sampled_from(PLANS), size=st.integers(1, 3))
    def begin(self, plan: zr.Plan, size: int) -> None:
        self._open(plan, size)

    def _open(self, plan: zr.Plan, size: int) -> None:
        ranks = self.ranks = Ranks(size)
        optimizer = zr.AdamW(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        scratch = self.directory / "scratch"
        self.rts = ranks.all(
            lambda rank: zr.open(
                plan=plan,
                optimizer=optimizer,
                group=ranks.groups[rank],
                scratch=scratch,
                create_scratch=True,
                offload=OFFLOAD,
            )
        )

    def _close(self) -> None:
        if self.ranks is not None:
            self.ranks.do(lambda rank: self.rts[rank].close())
            self.ranks.close()
            self.ranks = None

    def teardown(self) -> None:
        self._close()
        left = list((self.directory / "scratch").glob("*"))
        shutil.rmtree(self.directory)
        assert left == []

    # -- verbs -----------------------------------------------------------------------------------------------------

    def _draw(self, *key: int, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.random.default_rng((self.number, *key)).standard_normal(shape)

    @precondition(lambda self: len(self.model.tensors) < len(SHAPES) and not self.gradients)
    @rule()
    def register(self) -> None:
        self.number += 1
        name, shape = f"unit{len(self.model.tensors)}", SHAPES[len(self.model.tensors)]
        value = self._draw(shape=shape)
        self.ranks.all(lambda rank: self.rts[rank].register(name, {"w": value}))
        self.model.tensors[name] = Tensor(value)

    @rule(data=st.data())
    def reduce(self, data: st.DataObject) -> None:
        waiting = sorted(set(self.model.tensors) - set(self.gradients))
        if not waiting:
            return
        name = data.draw(st.sampled_from(waiting))
        self.number += 1
        shape = self.model.tensors[name].value.shape
        each = [self._draw(1, rank, shape=shape) for rank in range(self.ranks.size)]
        self.ranks.all(lambda rank: self.rts[rank].units[name].reduce({"w": each[rank]}))
        self.gradients[name] = sum(each) / len(each)

    @precondition(lambda self: self.gradients)
    @rule()
    def discard(self) -> None:
        self.ranks.all(lambda rank: self.rts[rank].discard_gradients())
        self.gradients.clear()

    @rule()
    def step(self) -> None:
        if not self.gradients:
            self.ranks.refused(lambda rank: self.rts[rank].step(), UnitStateError, "Expected gradients before step")
            return
        reports = self.ranks.all(lambda rank: self.rts[rank].step())
        self._updated()
        assert all(report.updated and report.update == self.model.updates for report in reports)

    def _updated(self) -> None:
        for name, gradient in self.gradients.items():
            self.model.tensors[name].update(gradient)
        self.gradients.clear()
        self.model.updates += 1

    @precondition(lambda self: self.gradients and self._can_load())
    @rule(kind=st.sampled_from(["eio", "enospc"]), at=st.integers(1, 12), data=st.data())
    def step_on_a_disk_that_fails(self, kind: str, at: int, data: st.DataObject) -> None:
        """Which write of which rank fails depends on the threads; the ranks tell one story, and a load mends it."""
        name = data.draw(st.sampled_from(self._can_load()))
        before = copy.deepcopy(self.model)
        with injected(f"{kind}@{at}:op=write:times=all"):
            stepped = self.ranks.do(lambda rank: self.rts[rank].step())
            saved = self.ranks.do(lambda rank: self.rts[rank].save(self.directory / "no"))
        has_failed = _have_failed(stepped)
        self._updated()
        self.ranks.all(lambda rank: self.rts[rank].discard_gradients())
        found = self.ranks.do(self._weights)
        if _have_failed(found):  # the step may have returned before its last write failed
            assert _have_failed(saved)
            assert not (self.directory / "no" / "manifest.json").exists()
        else:
            self._expect_weights(found, before if has_failed else self.model)
        self._load(name)
        shutil.rmtree(self.directory / "no", ignore_errors=True)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.gradients)
    @rule(name=st.sampled_from("ab"))
    def save(self, name: str) -> None:
        self.ranks.all(lambda rank: self.rts[rank].save(self.directory / name))
        self.saved[name] = copy.deepcopy(self.model)

    def _can_load(self) -> list[str]:
        names = self.model.tensors.keys()
        return sorted(path for path, kept in self.saved.items() if kept.tensors.keys() == names)

    def _load(self, name: str) -> None:
        kept = self.saved[name]
        for restored in self.ranks.all(lambda rank: self.rts[rank].load(self.directory / name)):
            assert restored.updates == kept.updates
        self.model = copy.deepcopy(kept)

    @precondition(lambda self: self.saved and not self.gradients and self.model.tensors)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.saved)))
        if name in self._can_load():
            self._load(name)
        else:
            self.ranks.refused(lambda rank: self.rts[rank].load(self.directory / name), CheckpointError, "Expected")

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), plan=st.sampled_from(PLANS), size=st.integers(1, 3))
    def go_on_with_another_plan(self, data: st.DataObject, plan: zr.Plan, size: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.saved)))
        self._close()
        self._open(plan, size)
        self.gradients.clear()
        self.model = copy.deepcopy(self.saved[name])
        for unit, tensor in self.model.tensors.items():
            spec = zr.TensorSpec(tensor.value.shape, "float64")
            self.ranks.all(lambda rank, unit=unit, spec=spec: self.rts[rank].register(unit, {"w": spec}))
        if self.model.tensors:
            self.ranks.all(lambda rank: self.rts[rank].load(self.directory / name))

    # -- what holds ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.ranks is not None)
    @invariant()
    def values_are_the_models(self) -> None:
        self._expect_weights(self.ranks.all(self._weights), self.model)

    def _expect_weights(self, found: list[dict[str, Any]], model: Model) -> None:
        for values in found:
            assert values.keys() == model.tensors.keys()
            for name, value in values.items():
                Runs.compared += 1
                np.testing.assert_allclose(value, model.tensors[name].value, rtol=1e-10, atol=1e-12)

    def _weights(self, rank: int) -> dict[str, Any]:
        found = {}
        for name, unit in self.rts[rank].units.items():
            with unit.gathered() as values:
                found[name] = np.array(values["w"])
        return found


@pytest.mark.slow
def test_random_runs_hold_what_a_model_in_memory_holds() -> None:
    """Each example is a run of its own; every value is compared after every verb. `make fuzz` tries more of them."""
    examples = 500 if "ZERORT_EXECUTIONS" in os.environ else 20
    Runs.TestCase.settings = settings(max_examples=examples, stateful_step_count=25)
    Runs.compared = 0
    Runs.TestCase().runTest()
    assert Runs.compared > 10 * examples  # not only runs without a unit
