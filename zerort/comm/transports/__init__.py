"""Transports: what carries a group's bytes, all behind one contract (`zerort.testing.contracts.group`).

solo.py                    one rank
node/                      ranks of one machine, over shared memory
mpi.py                     any communicator of MPI
messages/                  messages between ranks that share no memory, over MPI or sockets; alarms
greeting.py                calls compared by digest between hosts, with data of small ones
places.py                  where all ranks make their calls from, as headers told it once
small_calls.py             which those are, and sums of which each host sums a part
hierarchical.py            shared memory within a host, messages between hosts
hosts_shortcut.py          the same for a call that is made again, in one native step; of long ones the meeting
shift.py  rounds.py        who sends what to whom between hosts, in rounds, several of them at a time
carrier.py                 sums, gathers and broadcasts made of them
host_side.py               what the ranks of a host do before something leaves and after something has come
nccl/                      GPUs, on ranks that first agree over the host
"""
