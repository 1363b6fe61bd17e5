"""In which form an optimizer keeps what belongs to its parameters.

masters.py    MASTERS, MasterForm: master weights of 16-bit parameters, whole or as what the parameter lacks
moments.py    Blocks, INT8: moments in 8 bits
sparsity.py   Sparsity: how many elements are pruned, and when
masks.py      masks in bits: which elements are the smallest, and what is pruned is zero; masks_cuda.py on GPUs
"""
