"""What a project built on zerort needs to test itself: contract suites, and ways to start ranks.

    contracts/           what every group, device, store and residence holds: suites to subclass
    memory_store.py      the simplest store that passes its contract
    threads.py           `run_threads`: N ranks as threads of this process (threads_transport.py carries their bytes)
    counted_post.py      messages between threads, counted: what a rank sends as ranks grow
    jobs.py              `run_job`: N ranks as processes under mpirun, with a timeout that dumps every rank's stacks
    pytest_ranks.py      a test that fails on one rank fails on all
    tolerance.py         how far two computations of the same numbers may be apart

``python -m zerort.testing 1 2 3 4 8 -- tests/ranks`` runs pytest under mpirun at each of these sizes.
"""

# not-gpu: tests wait as users do
from zerort.testing.jobs import JobResult, run_job
from zerort.testing.threads import run_threads

__all__ = ["JobResult", "run_job", "run_threads"]
