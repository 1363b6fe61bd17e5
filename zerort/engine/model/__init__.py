"""What is gathered and reduced: units of parameters, and the sections of one dtype that they are made of.

registration.py  tensors.py  values.py     from arrays by name to a unit, agreed on by all ranks
unit.py  units.py  assignment.py           `Unit`: gather, release, assign
division.py                                how tensors are divided into sections, and sections cut over ranks
frozen.py                                  in which blocks frozen parameters rest
section.py                                 the tensors of a unit that share a dtype: parameters, gradients, state
gather.py  prefetch.py                     the gathered form of a unit, and which unit comes next
apart.py                                   gathers of units that only some ranks use
gradients/                                 a unit's and a section's gradients, from backward to the step
bound_unit.py                              a unit as a framework uses it
slot_set.py                                memory that takes turns: gathered units, gradients in flight
"""
