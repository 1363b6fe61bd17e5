"""Checkpoints of a runtime.

snapshot.py     what a checkpoint holds: the values of every unit, and the numbers beside them
gathered.py     what ranks compute with, where that is made of differences
residuals.py    what coding has lost of gradients, of each sender
saving.py       when one is written and read, and what a failure leaves
recoded.py      state and parameters that a checkpoint holds in another form, coded or decoded while it is loaded
packed_values.py  small values of a binding, as a checkpoint holds them
last_step.py    a checkpoint of every step, and the room that takes
"""
