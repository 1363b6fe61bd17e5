"""Ranks of one machine over shared memory: nothing moves that need not, and no MPI is on the hot path.

transport.py  split.py     the transport, and sub-groups of it
meeting.py                 ranks wait for each other, and find out who is missing
window.py  shelf.py  memory.py   memory that every rank has mapped, and this rank's part of it
rounds.py                  collectives through staging slabs, for arrays that the others cannot read
shortcut.py                calls made before, in one native step
board.py  flights.py       texts that ranks leave for each other; the flight record
"""
