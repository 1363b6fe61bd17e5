"""Which samples a step is made of: one global order, and each rank's part of every batch.

permutation.py      a seeded permutation of any length in O(1) memory
order.py            `Order`: samples in permuted order, epoch after epoch, cut into batches
share.py            `Share`: this rank's part of a batch
cursor.py           `Cursor`: how far the samples of an order are used, the one number that a checkpoint keeps

`Runtime.take` walks an order with the steps of a runtime. Files and arrays are the caller's: this room deals in
indices, and imports NumPy and `zerort.errors`.
"""

from zerort.data.cursor import Cursor
from zerort.data.order import Order
from zerort.data.share import Share

__all__ = ["Cursor", "Order", "Share"]
