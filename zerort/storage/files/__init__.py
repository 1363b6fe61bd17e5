"""Files of stores and checkpoints: made, named, synced, checked and deleted in one place.

disk.py  activity.py       the operations that change a file system, and which of them are under way
blocks.py  shared_file.py  blocks between memory and files past the page cache, by a few threads (workers.py)
segments.py                how a range of bytes is cut into pieces that a disk can move and a checksum covers
mounts.py  preflight.py    which disk holds a path, and what a directory can do, before it is used
owners.py                  which process a file belongs to, and whether it is gone
extents.py                 which bytes of a value a file holds, and how it is linked
hard_links.py              where files can be given a second name
failures.py                what a file system refused, in our words, with the cure
faults.py                  ``ZERORT_FAULT``: break the disk on purpose
"""
