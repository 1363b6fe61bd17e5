"""``zerort bench nvme``, ``offload`` and ``checkpoint``: what stores reach of the disk's own speed.

arguments.py                          their command lines
nvme.py  offload.py  checkpoint.py    a store; AdamW over state on a disk; saves and loads
rawdisk.py  fio.py                    the disk itself, measured by plain threads and by fio
"""
