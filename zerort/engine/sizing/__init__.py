"""How many bytes a rank takes of each memory, and what fits into a budget.

requirements.py  working.py    what a section takes at rest, and what computing and moving take besides
section_size.py  state_sizes.py    the bytes of a section, by part; of that, the optimizer state
table.py                       the same of an open runtime: what it reserves, and decides within a budget
forecast.py                    `zerort.forecast`: bytes by memory, and what a step moves
counted.py                     `Runtime.memory`: what is really there, counted from arrays
history.py  predicting.py      peaks of past steps, and what other steps will take: `Runtime.predict`
budget.py  planner.py          from bytes and capacities to tiers; when that is decided
"""
