"""Messages between ranks that share no memory: who carries them, what they cost, and how ranks hear of lost ones.

exchange.py                sends, receives and waits, with an eye on the clock and on alarms
wire.py  sockets.py        hands messages to MPI or to sockets, and waits for them without the GIL; which of both
network.py                 what messages between hosts cost, measured when a group opens
alarms.py  giving_up.py    how ranks learn that others give up, fail or leave, and name the same missing ones
"""
