"""GPUs over NCCL, on ranks that first agree over the host. Imported when a GPU is asked for.

opening.py                 open NCCL on all ranks, or on none
transport.py  moves.py     the transport; what each collective is in NCCL
watch.py                   ends calls on the GPU that can no longer end by themselves
pinned.py                  pinned host memory for all ranks of a group
"""
