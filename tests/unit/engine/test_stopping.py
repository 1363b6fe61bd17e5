"""Signals while a runtime is open: noted, handed on in children and after the end, and never swallowed."""

import subprocess
import sys
import textwrap

import pytest

from zerort.engine.stopping import Stopping
from zerort.errors import StopRequested

PRELUDE = """
import os, signal, threading
import zerort as zr

def interrupted(number):
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        return True
    return False

def on_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

signal.signal(signal.SIGINT, signal.default_int_handler)  # started in the background of a script, it would be ignored
before = signal.getsignal(signal.SIGINT)
"""


def run(code):
    """Run a program of its own: its signals are its own, too."""
    program = PRELUDE + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)


def test_ctrl_c_interrupts_whichever_signal_came_first():
    code = """
    with zr.open(optimizer=zr.SGD(lr=0.1)) as rt:
        signal.raise_signal(signal.SIGUSR1)
        print(interrupted(signal.SIGINT), interrupted(signal.SIGINT))
    """
    ended = run(code)
    assert (ended.returncode, ended.stdout) == (0, "False True\n"), ended.stderr


def test_a_forked_child_ends_by_sigterm():
    code = """
    with zr.open(optimizer=zr.SGD(lr=0.1)) as rt:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM)
    """
    ended = run(code)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


def test_a_runtime_may_be_closed_by_another_thread():
    code = """
    rt = zr.open(optimizer=zr.SGD(lr=0.1))
    on_a_thread(rt.close)
    print(interrupted(signal.SIGINT), signal.getsignal(signal.SIGINT) is before)
    """
    ended = run(code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True True\n", ""), ended.stderr


def test_a_runtime_of_another_thread_does_not_keep_signals_from_this_ones():
    code = """
    opened = []
    on_a_thread(lambda: opened.append(zr.open(optimizer=zr.SGD(lr=0.1))))
    with zr.open(optimizer=zr.SGD(lr=0.1)) as rt:
        print(interrupted(signal.SIGINT), interrupted(signal.SIGINT))
    opened[0].close()
    print(signal.getsignal(signal.SIGINT) is before)
    """
    ended = run(code)
    assert (ended.returncode, ended.stdout) == (0, "False True\nTrue\n"), ended.stderr


def test_a_step_is_one_too_many_only_when_the_caller_was_told():
    stopping = Stopping("rank 0")
    stopping.hear("SIGTERM on rank 1")
    stopping.check()  # the report has not come to the caller: keeping the step failed
    stopping.tell()
    with pytest.raises(StopRequested, match="SIGTERM on rank 1"):
        stopping.check()
