"""``zerort bench step``: a training step under several plans and without the runtime, in turn, in one run.

arguments.py has the command line, command.py the benchmark, contenders.py the steps, rows.py what was found.
"""
