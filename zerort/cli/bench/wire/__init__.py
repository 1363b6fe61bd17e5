"""``zerort bench wire``: speed and error of the codecs.

arguments.py has the command line, command.py the benchmark.
"""
