"""What a step is made of: agree, finish reductions, measure, decide, update, refresh.

step.py                       the order of a step; until `update` nothing has changed
update.py                     kernels over this rank's range of every section
state.py  state_entry.py      what the optimizer keeps for a section, and the pass that updates it
copies.py                     whether all copies of the model have reduced the same units
"""
