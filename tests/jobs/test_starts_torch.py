"""Started by torchrun: a real one, around programs that are for mpirun."""

import re
import shlex
import subprocess
import sys

from zerort.comm.bootstrap.environment import without_launcher

TRAIN = """
import sys, zerort as zr
group = zr.open_group(kind="solo") if "alone" in sys.argv else None
with zr.open(group=group) as rt:
    sys.stdout.write(f"rank {rt.rank} of {rt.size}\\n")
"""


def run(*words):
    return subprocess.run(
        words,
        env=without_launcher(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )


def test_torchrun_is_told_what_to_type_and_that_works(tmp_path):
    script = tmp_path / "train a model.py"
    script.write_text(TRAIN)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = run(*torchrun, str(script), "--name", "a b")
    assert done.returncode == 1
    assert "rank 0 of 1" not in done.stdout
    found = re.search(
        r"LauncherMismatchError: Expected one world of 2 ranks, as torchrun has it.*?\n\n    (\S*mpirun -n 2 .*)\n",
        done.stdout,
    )
    assert found is not None, done.stdout
    command = shlex.split(found[1])
    assert command[-3:] == [str(script), "--name", "a b"]
    typed = run(*command)
    assert typed.returncode == 0, typed.stdout
    assert "rank 0 of 2" in typed.stdout
    assert "rank 1 of 2" in typed.stdout
    alone = run(*torchrun, str(script), "alone")
    assert alone.returncode == 0, alone.stdout
    assert alone.stdout.count("rank 0 of 1") == 2
