"""Where bytes are, and how they get here: parameters, gradients and state in memory, on the host, on a disk.

choose.py                                   in which memory each part of a section lies
chunked_array.py                            a 1-D array of this rank's, cut into chunks, in memory or in a store
halves.py                                   bfloat16 parameters and their remainders as float32 masters, for checkpoints
parameters.py                               shards to the whole and back: the contract, and the table of placements
sharded.py  replicated.py                   each rank its range, wherever it rests; the whole everywhere
copied.py                                   the same with a copy of the whole that stays on each host
coded_parameters.py  decoded_array.py       frozen parameters that rest as codes, and are decoded to the whole
backings.py                                 makes arrays and parameters: the one place that chooses by tier and device
gradients.py  folded.py                     summed gradients between reduction and update; in a fixed tree
host_memory.py                              on GPUs: host memory that all ranks pin, or none
"""
