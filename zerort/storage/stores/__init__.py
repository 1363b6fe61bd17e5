"""Stores: bytes by name at a tier, all behind one contract (`zerort.testing.contracts.store`).

store.py                            `Store`: what every store can do, and the checks that all make alike
nvme.py  chunk_file.py              one disk: a file per value, with checksums
operation.py  worker_pool.py        a read or write in parts, and the threads that share it
striped.py                          several disks as one
bridged.py                          values on a disk for arrays on a GPU, through pinned slots
"""
