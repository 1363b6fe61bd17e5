"""``zerort bench collectives``: every collective against MPI and the memory limit.

arguments.py  command.py  gpus.py    the command line; runs on hosts and on GPUs
sweep.py                             every operation at every size, in turn
operations.py  trials.py             the table of operations; one run of one of them, checked
buffers.py  footprint.py             arrays, made once per size; what a gather costs a node in bytes
rows.py  tables.py  plots.py         what was measured, as values, tables and a plot
"""
