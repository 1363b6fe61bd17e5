"""Transports: what carries a group's bytes, all behind one contract (`zerort.testing.contracts.group`).

solo.py                    one rank
node/                      ranks of one machine, over shared memory
mpi.py                     any communicator of MPI
messages/                  messages between ranks that share no memory, over MPI or sockets; alarms
greeting.py                calls compared by digest between hosts, with data of small ones
places.py                  where all ranks make their calls from, as headers told it once
small_calls.py             which those are, and sums of which each host sums a part
hierarchical.py            shared memory within a host, messages between hosts
hosts_shortcut.py          the same for a small call that is made again, in one native step
shift.py  carrier.py       who sends what to whom between hosts; several rounds of it at a time
host_side.py               what the ranks of a host do before something leaves and after something has come
nccl/                      GPUs, on ranks that first agree over the host
"""
