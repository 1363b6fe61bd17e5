"""What a torch user would take instead of zerort, and zerort itself, on exactly the same work. One file per method.

    work.py      what is trained: sizes, data, AdamW's settings, and `Method`, which every file here fills in
    gpt.py       the model
    single.py    the floor: each rank a process of its own; and the reference, one process with all ranks' batches
    ddp.py  fsdp2.py  deepspeed_zero3.py  zerort_plans.py
    __main__.py  a rank: builds a method and takes steps when told to
    jobs.py      the other end: starts the ranks of a method, tells them, watches their memory
    figures.py   tables and targets

Run by `bench_torch_step.py`, or one alone: ``PYTHONPATH=benchmarks mpirun -n 2 python -m peers zero3 --steps 10``.
"""
