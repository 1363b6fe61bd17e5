"""Kernels over rows of tables: copied by their numbers, summed, updated, and brought up to date.

kernels.py         over arrays of the host
kernels_cuda.py    the same over CuPy's, on a GPU

`zerort.optim.kernels.row_kernels_for` chooses between them. Numbers of rows and what updates do by age are arrays of
the host for both; `zerort.optim.late` keeps the latter (decisions 0155, 0192).
"""
