"""Flat buffers: one 1-D array for many tensors, how it lies over the ranks, and how it is moved.

redistribute.py   the placement table as code: which collective turns one placement into another
gather.py         how ranges become the whole: as they are, or as codes that every rank decodes
leaves.py         one fixed pairwise tree over a step's micro-batches, and which rank computes which
tree.py           sums in it of whole gradients, whichever rank computed what
folding.py        the same of shards: slices are folded as they arrive
collecting.py     a micro-step's gradients, written where they belong, tensor by tensor
bucket.py         GradientBucket: collects gradients and fires their reduction
tied.py           gradients of a tied tensor, reduced into the sum of the unit that holds it
sinks.py          where the sum of its reductions is kept until the step
kernels.py        what buckets compute with, on the host or on a GPU
coded/            what travels as codes: deltas and non-zeros of parameters, summands of gradients
views.py          tensors by name, for as long as their buffer is gathered
"""

from zerort.buffer.bucket import GradientBucket
from zerort.buffer.coded.ranges import BlockCodes, Changes, DifferenceCodes, NonZeros, RangeCodec, room_nbytes
from zerort.buffer.coded.reduce import CodedReduce, sent_nbytes
from zerort.buffer.coded.residual import Residual
from zerort.buffer.coded.senders import Routes, Senders
from zerort.buffer.folding import FoldedShard, Folding
from zerort.buffer.gather import PLAIN, CodedGather, RangeGather, tell_sizes
from zerort.buffer.kernels import HOST_KERNELS, BucketKernels
from zerort.buffer.leaves import Leaves, insert
from zerort.buffer.redistribute import redistribute
from zerort.buffer.sinks import GradientSink, ReduceInto, SummedShard, TiedSums
from zerort.buffer.tied import TiedRange
from zerort.buffer.tree import TreeSum, sum_over_copies, tree_reduce_scatter
from zerort.buffer.views import Views, gathering, unit_title

__all__ = [
    "HOST_KERNELS",
    "PLAIN",
    "BlockCodes",
    "BucketKernels",
    "Changes",
    "CodedGather",
    "CodedReduce",
    "DifferenceCodes",
    "FoldedShard",
    "Folding",
    "GradientBucket",
    "GradientSink",
    "Leaves",
    "NonZeros",
    "RangeCodec",
    "RangeGather",
    "ReduceInto",
    "Residual",
    "Routes",
    "Senders",
    "SummedShard",
    "TiedRange",
    "TiedSums",
    "TreeSum",
    "Views",
    "gathering",
    "insert",
    "redistribute",
    "room_nbytes",
    "sent_nbytes",
    "sum_over_copies",
    "tell_sizes",
    "tree_reduce_scatter",
    "unit_title",
]
