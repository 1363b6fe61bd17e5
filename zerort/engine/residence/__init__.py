"""Where bytes are, and how they get here: parameters, gradients and state in memory, on the host, on a disk.

choose.py                                   in which memory each part of a section lies
chunked_array.py                            a 1-D array of this rank's, cut into chunks, in memory or in a store
column_parameters.py  host_parameters.py  resting_parameters.py     offloaded parameters
gradients.py                                summed gradients between reduction and update
tiers.py  scratch_store.py                  this rank's store and pipeline, and what a failure leaves
host_memory.py  slot_memory.py  stage.py    on GPUs: pinned memory, and how arrays get to where they are updated
"""
