"""Parameters of torch over the runtime's memory: live while their unit is gathered, released otherwise.

unit.py      `TorchUnit`: parameters come and go          released.py  `ReleasedParameter`: the stand-in
memory.py    DLPack, and on which stream                  writes.py    writes to parameters that are only to be read
strays.py    parameters that nobody would update          guard.py     torch's own optimizers are refused
hidden.py    functions that torch.compile leaves out      turns.py     ranks that use different parameters
table.py     `TableUnit`: rows of embeddings with sparse gradients
"""
