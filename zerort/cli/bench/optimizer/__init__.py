"""``zerort bench optimizer``: fused updates against the memory limit, their NumPy forms and torch.

arguments.py has the command line, command.py the benchmark, contenders.py who computes the same update.
"""
