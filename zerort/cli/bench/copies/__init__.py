"""``zerort bench copies``: one GPU's memory filled from the host and emptied to it, and updates streamed through it.

arguments.py has the command line, command.py the copies, updates.py the streamed updates.
"""
