"""Stores: bytes by name at a tier, all behind one contract (`zerort.testing.store_contract`).

store.py                            `Store`: what every store can do, and the checks that all make alike
nvme.py  chunk_file.py              one disk: a file per value, with checksums
worker_pool.py                      the threads that share each read or write
striped.py                          several disks as one
bridged.py  passage.py  later.py    values on a disk for arrays on a GPU, through pinned slots
extents.py                          which files hold a value, for a checkpoint that takes them over
"""
