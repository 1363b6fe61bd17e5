"""Transports: what carries a group's bytes, all behind one contract (`zerort.testing.contracts.group`).

solo.py                    one rank
node/                      ranks of one machine, over shared memory
mpi.py  exchange.py        any communicator of MPI
alarms.py  giving_up.py    how ranks learn that others give up, fail or leave, and name the same missing ones
greeting.py  network.py    calls compared by digest between hosts, with data of small ones; which way is faster
hierarchical.py            shared memory within a host, MPI between hosts
shift.py  carrier.py       who sends what to whom between hosts; several rounds of it at a time
host_side.py               what the ranks of a host do before something leaves and after something has come
nccl/                      GPUs, on ranks that first agree over the host
"""
