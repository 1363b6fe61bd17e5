"""``zerort doctor``: one file per subject that it looks at; each returns findings (finding.py).

arguments.py  command.py       the command line; every checkup in turn
software.py  mpi.py            Python, NumPy and kernels; the MPI library and its launcher
shared_memory.py  disk.py      /dev/shm; a scratch directory
gpus.py  places.py             GPUs, CuPy and NCCL; which cores and GPU each rank has
probe.py                       small jobs in other processes, as a library may abort or hang
"""
