"""Jobs of several ranks with a GPU each: what their scripts begin with, and who said what. See the fixture `job`."""

import re

PRELUDE = """
import json, os, signal, sys, time, warnings
import numpy as np
import zerort as zr
from zerort.errors import *

rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", 0)))

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def open_group(**options):
    return zr.open_group(kind="nccl", options=zr.GroupOptions.from_environment(**{"timeout": 5.0, **options}))

def block_this_rank(seconds):
    # The GPU comes to what is queued behind this when the host function has returned.
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.launch_host_func(lambda _: time.sleep(seconds), None)
    return stream

def close_and_count(group):
    device = group._transport.device
    group.close()
    del group
    cupy.get_default_memory_pool().free_all_blocks()
    free, total = device.memory()
    # On a real GPU, CUDA itself and the kernels that were loaded keep some, never as much as a tenth.
    say("rank", rank, "released", free == total if os.environ.get("CUSIM") == "1" else free > total * 0.9)
"""


def ranks_that(pattern: str, output: str) -> list[str]:
    """Return which ranks said something that matches."""
    return sorted(re.findall(rf"rank (\d) {pattern}", output))
