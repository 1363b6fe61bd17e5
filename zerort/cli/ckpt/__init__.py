"""``zerort ckpt``: look at, verify and export checkpoints, in one process.

arguments.py has the command line, command.py the three commands.
"""
