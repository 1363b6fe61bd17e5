"""The `zerort` command: check this machine, measure it, forecast the memory of a model, look at checkpoints.

    main.py  arguments.py            the command line; each command has its own arguments.py beside it
    ranks.py  world.py               start ranks, and agree among them
    screen.py  machine.py            print for them, and describe the machine
    doctor/                          findings, each ok, warn or bad, with the cure; some run in other processes
    plan/                            the forecast for a model
    ckpt/                            inspect, verify and export checkpoints
    bench/                           benchmarks over one harness

MPI, rich, matplotlib and torch are imported only by the commands that use them.
"""

# not-gpu: commands wait as users do
