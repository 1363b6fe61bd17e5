"""Checkpoints of a runtime.

snapshot.py     what a checkpoint holds: the values of every unit, and the numbers beside them
saving.py       when one is written and read, and what a failure leaves
last_step.py    a checkpoint of every step, and the room that takes
"""
