"""Sharded checkpoints: written by every rank at once, read back by any number of ranks, checked to the byte.

    save(path, group, values, meta=…)     save.py                own, agree, write, commit
                                          assemble.py            the manifest, from what every rank has written
    load(path, group, values)             load.py   reader.py    by tensor name, resharded, converted
    verify(path)   export(path, out)      verify.py export.py    without a group
                                          value.py  failure.py   what is saved; errors on all ranks

`format/` is what stands in the files, `files/` the directory that they lie in.
A checkpoint is a directory: a data file per saving rank and one ``manifest.json``, renamed into place when everything
else is on the disk. No pickle.
"""

# not-gpu: between the host and a disk
from __future__ import annotations

from zerort.checkpoint.export import export
from zerort.checkpoint.files.directory import exists, read_manifest
from zerort.checkpoint.format.manifest import DataFile, Manifest, StoredExtent, StoredTensor
from zerort.checkpoint.load import load
from zerort.checkpoint.reader import Damage
from zerort.checkpoint.save import Saved, save
from zerort.checkpoint.value import JSON, OffloadedArray, Value, as_json
from zerort.checkpoint.verify import verify

__all__ = [
    "JSON",
    "Damage",
    "DataFile",
    "Manifest",
    "OffloadedArray",
    "Saved",
    "StoredExtent",
    "StoredTensor",
    "Value",
    "as_json",
    "exists",
    "export",
    "load",
    "read_manifest",
    "save",
    "verify",
]
