"""Signals while a runtime is open: noted, handed on in children and after the end, and never swallowed."""

import os
import signal
import threading
import warnings

import pytest

import zerort as zr
from zerort.engine.stopping import Stopping
from zerort.errors import StopRequested


@pytest.fixture
def runtime():
    with zr.open(optimizer=zr.SGD(lr=0.1)) as rt:
        yield rt


def test_ctrl_c_interrupts_whichever_signal_came_first(runtime):
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_forked_child_ends_by_sigterm(runtime):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of threads that the child lacks
        child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_a_runtime_may_be_closed_by_another_thread():
    before = signal.getsignal(signal.SIGINT)
    rt = zr.open(optimizer=zr.SGD(lr=0.1))
    errors = []

    def close():
        try:
            rt.close()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert not errors
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_step_is_one_too_many_only_when_the_caller_was_told():
    stopping = Stopping("rank 0")
    stopping.hear("SIGTERM on rank 1")
    stopping.check()  # the report has not come to the caller: keeping the step failed
    stopping.tell()
    with pytest.raises(StopRequested, match="SIGTERM on rank 1"):
        stopping.check()
