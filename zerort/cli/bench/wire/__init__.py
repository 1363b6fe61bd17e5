"""``zerort bench wire``: speed and error of the codecs, and what an update changes.

arguments.py has the command line, command.py the benchmark, shares.py the elements that an update changes.
"""
