"""``zerort plan``: what a model takes of each memory, under every plan or within a budget.

arguments.py has the command line, command.py the tables, asked.py the plans, models.py reads what describes a model,
named.py what is said of its tensors by name, predicted.py adds what a history says.
"""
