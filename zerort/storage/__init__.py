"""Values below memory: stores on disks, and the files that stores and checkpoints write.

files/     blocks past the page cache, links, faults on purpose, preflight: all that a checkpoint may import
stores/    `Store`: bytes by name, on a disk (nvme), on several (striped), for arrays on a GPU (bridged)
session.py  opening.py    this rank's store from the first value to the end; the disks under it
scratch.py the directory of one run and rank, and what dead runs left behind
"""

from zerort.storage.files.preflight import DirectoryReport, inspect
from zerort.storage.stores.bridged import BridgedStore
from zerort.storage.stores.nvme import NvmeOptions, NvmeStore
from zerort.storage.stores.store import Store
from zerort.storage.stores.striped import StripedStore

__all__ = [
    "BridgedStore",
    "DirectoryReport",
    "NvmeOptions",
    "NvmeStore",
    "Store",
    "StripedStore",
    "inspect",
]
