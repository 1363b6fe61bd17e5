"""Transports: what carries a group's bytes, all behind one contract (`zerort.testing.group_contract`).

solo.py                    one rank
node/                      ranks of one machine, over shared memory
mpi.py  exchange.py        any communicator of MPI
hierarchical.py            shared memory within a host, MPI between hosts
nccl/                      GPUs, on ranks that first agree over the host
"""
