"""What ranks tell each other in a step's agreement, beside errors and gradients.

record.py                 named facts of every rank, each with its reduction, exchanged at once
weight.py                 what the sum of all gradients is divided by
rates.py                  learning rates: scheduled, or set by hand
pace.py  straggler.py     which rank is slow, and stays so
peaks.py                  how much memory steps take, where a history is kept
"""
