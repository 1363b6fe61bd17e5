"""Tell two classes of points apart with a small network in NumPy, sharded over ranks: the shortest whole program.

    python examples/classify.py                 # one process
    mpirun -n 4 python examples/classify.py     # four: the same training, each with a quarter of the points

`train.py` is a longer one, with checkpoints, plans to choose from and a trace.
"""

import numpy as np

import zerort as zr

rng = np.random.default_rng(0)  # the same points and first values on every rank
turn, is_inner = rng.uniform(0, 2 * np.pi, 2000), np.arange(2000) % 2 == 0  # two rings, one within the other
points = np.stack([np.cos(turn), np.sin(turn)], 1) * np.where(is_inner, 0.5, 1.0)[:, None]
points = (points + rng.normal(0, 0.1, points.shape)).astype(np.float32)
first = {"w1": rng.normal(size=(2, 16)), "b1": np.zeros(16), "w2": rng.normal(size=16), "b2": np.zeros(1)}

with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=0.03, weight_decay=0.0)) as rt:
    net = rt.register("net", {name: value.astype(np.float32) for name, value in first.items()})
    x, y = points[rt.rank :: rt.size], is_inner[rt.rank :: rt.size]
    for step in range(201):
        with net.gathered() as p:  # whole while it computes, a shard on each rank otherwise
            hidden = np.tanh(x @ p["w1"] + p["b1"])
            odds = 1 / (1 + np.exp(-(hidden @ p["w2"] + p["b2"])))
            slope = odds - y  # of a sum: the step divides by the points of all ranks, who may have different numbers
            back = slope[:, None] * p["w2"] * (1 - hidden**2)
        net.reduce({"w1": x.T @ back, "b1": back.sum(0), "w2": hidden.T @ slope, "b2": slope.sum(keepdims=True)})
        rt.step(weight=len(x))
        if step % 50 == 0:
            right = rt.group.all_reduce(np.array([np.sum((odds > 0.5) == y)])).wait()[0]
            if rt.rank == 0:
                print(f"step {step:3}: {right / len(points):.1%} of {len(points)} points right, ranks: {rt.size}")
