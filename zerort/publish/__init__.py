"""Publishing: weights for inference servers, as whole versions and lossless deltas in a directory.

    Feed(where, group, …).push()     feed.py       all ranks: the next version, whole or as a delta
    Reader(where).update()           reader.py     another process, without MPI: the newest version as arrays
                                     pieces.py     what a rank has of each tensor; the bits that it published last
                                     records.py    the files that say which versions there are

A version is there when ``feed.json`` names it, and never in part: that file is renamed into place when everything else
is on the disk, as a checkpoint's manifest is (decision 0124).
"""

# not-gpu: between the host and a disk
from __future__ import annotations

from zerort.publish.feed import Feed, Published
from zerort.publish.reader import Reader

__all__ = ["Feed", "Published", "Reader"]
