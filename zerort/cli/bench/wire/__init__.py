"""``zerort bench wire``: speed and error of the codecs, what an update changes, and a step on a slow link.

arguments.py has the command line, command.py the benchmark of the codecs, shares.py the elements that an update
changes; link.py times a training step between two hosts, uncoded and coded, link_rows.py tabulates and draws it.
"""
