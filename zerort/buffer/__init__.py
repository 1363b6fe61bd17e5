"""Flat buffers: one 1-D array for many tensors, how it lies over the ranks, and how it is moved.

redistribute.py   the placement table as code: which collective turns one placement into another
tree.py           sums in one fixed pairwise tree, whichever rank computed what
gatherable.py     ranges that ranks hold, and the whole that they look at
flat.py           FlatBuffer: pack, view, restore, release
bucket.py         GradientBucket: fills tensor by tensor, fires its reduction when full
kernels.py        what buckets compute with, on the host or on a GPU
views.py          tensors by name, for as long as their buffer is gathered
"""

from zerort.buffer.bucket import GradientBucket
from zerort.buffer.flat import FlatBuffer
from zerort.buffer.gatherable import Gatherable
from zerort.buffer.kernels import HOST_KERNELS, BucketKernels
from zerort.buffer.redistribute import redistribute
from zerort.buffer.tree import TreeSum, tree_reduce_scatter
from zerort.buffer.views import Views, gathering, unit_title

__all__ = [
    "HOST_KERNELS",
    "BucketKernels",
    "FlatBuffer",
    "Gatherable",
    "GradientBucket",
    "TreeSum",
    "Views",
    "gathering",
    "redistribute",
    "tree_reduce_scatter",
    "unit_title",
]
