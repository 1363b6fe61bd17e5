"""What is gathered and reduced: units of parameters, and the sections of one dtype that they are made of.

registration.py  tensors.py  values.py     from arrays by name to a unit, agreed on by all ranks
unit.py  units.py  assignment.py           `Unit`: gather, release, reduce, assign
reduced.py                                 a step's gradients, whole, before the step
division.py                                how tensors are divided into sections, and sections cut over ranks
section.py                                 the tensors of a unit that share a dtype: parameters, gradients, state
gather.py  prefetch.py                     the gathered form of a unit, and which unit comes next
bound_unit.py  gradient_order.py           a unit as a framework uses it; gradients in one order on all ranks
slot_set.py                                memory that takes turns: gathered units, gradients in flight
"""
