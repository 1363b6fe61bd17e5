"""What a step is made of: agree, finish reductions, measure, decide, update, refresh.

step.py                       the order of a step; until `update` nothing has changed
agree.py                      what all ranks know before anything changes; `facts/` are its parts
copies.py  discard.py         whether all copies of the model have reduced the same units; gradients dropped
measure.py                    the norm of all gradients
update.py  update_guard.py    kernels over this rank's range of every section; what a failure in between leaves
state.py  state_entry.py      what the optimizer keeps for a section, and the pass that updates it
state_columns.py              the memory that it is kept in
prune.py                      the smallest elements of tensors with a `Sparsity` become zero
refresh.py  digest.py         every rank sees all that was written; a checksum of it
"""
