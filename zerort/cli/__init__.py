"""The `zerort` command: look at this machine (``doctor``) and measure it (``bench``).

    main.py  arguments.py          the words of the command line, and who serves them
    ranks.py  world.py  screen.py  start ranks, agree among them, print for them
    doctor.py  checkup*.py         what is ok, warn or bad here, each with the cure; probe.py runs in other processes
    bench_collectives.py           operations.py (the table of what is run), buffers.py, trials.py, footprint.py
    bench_optimizer.py             optimizers.py
    timing.py  limits.py           interleaved timing, and the memory limit that it is held against
    rows.py  tables.py  plots.py  machine.py   what was found, for people and for machines

The top room: may import everything of zerort. MPI, rich, matplotlib and torch are imported only where they are used.
"""

# not-gpu: commands wait as users do
