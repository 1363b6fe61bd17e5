"""``zerort bench``: each benchmark in a folder, all over one harness (harness.py) and one way of timing (timing.py).

collectives/    every collective against MPI and the memory limit
step/           a training step under several plans against the same computing without the runtime
disk/           stores, streamed updates and checkpoints against the disk itself
optimizer/      fused updates against the memory limit and torch
copies/         a GPU's copies and streamed updates
wire/           codecs: speed against memcpy, bytes, error against its bound; a step on a slow link
hosts/          every collective, and a step, between hosts of network namespaces

arguments.py joins their command lines; options.py has what several share; limits.py measures the memory limit;
pictures.py draws plots.
"""
