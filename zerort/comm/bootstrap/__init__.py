"""Open a group: who started this process, where the ranks are, which transport carries their bytes best.

opening.py        `open_group`: together on all ranks, or an error on all
environment.py    which launcher started this process, with how many ranks, and which MPI library answers
leftovers.py      shared memory that killed jobs left behind
"""
