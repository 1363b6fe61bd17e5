"""The directory of a checkpoint: who may write to it, how files get there and when they go.

directory.py   lease.py     names, commit by rename; one saver at a time
writer.py      links.py     a rank's data file; files of a store that are taken over by hard links
compressed.py               a rank's data file of compressed extents
room.py        sweep.py     free space is asked for first; what was replaced is deleted afterwards
"""
