"""``zerort bench hosts``: every collective, and a training step, between several hosts.

arguments.py  command.py     the command line; makes the hosts, starts the ranks on them, joins what they found
namespaces.py                hosts of one machine: network namespaces on a bridge, swept when their owner has died
sweep.py  step.py            every collective at every size; a ZeRO-3 step beside the same ranks on one host
wire.py  sockets.py          what has to cross the wire, and how long that takes; plain sockets that carry as much
rows.py  plots.py            what was measured, as values, tables and a plot
"""
