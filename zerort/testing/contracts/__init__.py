"""Contract suites: what all implementations of a seam hold. A new one exists when a subclass of its suite passes.

group.py         `GroupContract`: ranks that disagree, are wrong, or have closed; say how to run a body on all ranks
collective.py    what a group's collectives deliver (part of `GroupContract`)
repeat.py        calls that are made again and again (part of `GroupContract`)
device.py        `DeviceContract`: memory, streams, tickets
store.py         `StoreContract`: bytes by name at a tier
residence.py     every ChunkedArray and all Parameters, wherever their bytes rest
forecast.py      what is told before a run is what is counted in it, under every plan and tier
ties.py          gradients of tied parameters are summed in whatever order units come, on every tier
"""
