"""A GPU as a `Device`, through CuPy: imported when a GPU is asked for, never by `import zerort`.

library.py                  the one place that imports cupy
device.py  stream.py        memory and streams of one GPU
order.py                    the work of several streams in the order of submission
pinned.py                   host memory that the GPU reads and writes by itself
kernel_module.py            CUDA source, compiled by NVRTC
report.py                   the GPUs of this machine as plain values, for ``zerort doctor``
"""
