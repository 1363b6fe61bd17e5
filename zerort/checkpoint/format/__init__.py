"""The form of a checkpoint: which bytes stand where in its files.

manifest.py   schema.py     one JSON file: tensors, extents, checksums; every field checked before it is used
coded.py                    frozen parameters that are stored as rows of codes
compression.py              byte planes of an extent as a zstd frame
extents.py                  where a rank's values lie in its data file
casts.py      safetensors.py    conversions on load; the form that others read
"""
