"""Plain NumPy loops on zerort: the reference binding.

    import zerort as zr
    import zerort_numpy as zn

    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=3e-4)) as rt:
        block = zn.register(rt, "block0", params)     # {"w": array, "b": array}
        with block.gathered() as p:                   # zero-copy views, read-only
            loss, gradients = value_and_grad(p, batch)
        block.reduce(gradients)                       # or write into block.gradients(): nothing is copied
        report = rt.step()

On GPUs (``zr.open(group=zr.open_group(kind="nccl"))``) the same loop gets and gives CuPy's arrays, on CuPy's current
stream; they are plain ones, which nobody guards.

A view that is used after its block raises `StaleViewError` and names the tensor. What NumPy reads without asking the
array (``np.array(view)``, ``x[...] = view``, ``memoryview(view)``, pickling) is not caught, and ``np.asarray(view)`` is
the way to a plain array for those who look after its lifetime themselves. Imports zerort and
NumPy only.
"""

from zerort_numpy.unit import NumpyUnit, register
from zerort_numpy.view import View

__all__ = ["NumpyUnit", "View", "register"]
