"""Sharded checkpoints: written by every rank at once, read back by any number of ranks, checked to the byte.

    save(path, group, values, meta=…)     value.py  extents.py  writer.py   what lies where, and how it gets there
                                          save.py   directory.py lease.py   own, agree, write, commit; sweep.py cleans
                                          links.py  room.py                 files that are taken over as they are
    load(path, group, values)             load.py   reader.py   casts.py    by tensor name, resharded, converted
    read_manifest(path)                   manifest.py schema.py             one JSON file; it is the checkpoint
    verify(path)   export(path, out)      verify.py export.py safetensors.py
                                          failure.py                        errors on all ranks

A checkpoint is a directory: a data file per saving rank and one ``manifest.json``, renamed into place when everything
else is on the disk. No pickle.
"""

# not-gpu: between the host and a disk
from __future__ import annotations

from zerort.checkpoint.directory import exists, read_manifest
from zerort.checkpoint.export import export
from zerort.checkpoint.load import load
from zerort.checkpoint.manifest import DataFile, Manifest, StoredExtent, StoredTensor
from zerort.checkpoint.reader import Damage
from zerort.checkpoint.save import Saved, save
from zerort.checkpoint.value import JSON, Resting, Value, as_json
from zerort.checkpoint.verify import verify

__all__ = [
    "JSON",
    "Damage",
    "DataFile",
    "Manifest",
    "Resting",
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
