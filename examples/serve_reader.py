"""Serve a model while it trains: a trainer publishes its weights, a server in another process takes each new version.

    mpirun -n 2 python examples/serve_reader.py train feed      # trains, and publishes every 20 steps into feed/
    python examples/serve_reader.py serve feed                  # meanwhile: answers with the newest weights; no MPI

The server tells which of 500 points lie on the inner of two rings, as `examples/classify.py` trains it.
"""

import argparse
import time
from collections.abc import Mapping

import numpy as np

import zerort as zr
from zerort.errors import CheckpointError


def points_of(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points on two rings, one within the other, and which are the inner ones."""
    rng = np.random.default_rng(seed)
    turn, is_inner = rng.uniform(0, 2 * np.pi, count), np.arange(count) % 2 == 0
    points = np.stack([np.cos(turn), np.sin(turn)], 1) * np.where(is_inner, 0.5, 1.0)[:, None]
    return (points + rng.normal(0, 0.1, points.shape)).astype(np.float32), is_inner


def odds_of(p: Mapping[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how likely each point is an inner one, and what the network computed on the way."""
    hidden = np.tanh(x @ p["w1"] + p["b1"])
    return 1 / (1 + np.exp(-(hidden @ p["w2"] + p["b2"]))), hidden


def train(where: str, steps: int) -> None:
    """Train, and publish every 20 steps: a whole version first, then what changed since the one before."""
    rng = np.random.default_rng(0)
    first = {"w1": rng.normal(size=(2, 16)), "b1": np.zeros(16), "w2": rng.normal(size=16), "b2": np.zeros(1)}
    points, is_inner = points_of(0, 2000)
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=0.03, weight_decay=0.0)) as rt:
        net = rt.register("net", {name: value.astype(np.float32) for name, value in first.items()})
        feed = rt.publish(where, dtype="bfloat16", full_every=50)
        x, y = points[rt.rank :: rt.size], is_inner[rt.rank :: rt.size]
        for step in range(1, steps + 1):
            with net.gathered() as p:
                odds, hidden = odds_of(p, x)
                slope = (odds - y) * rt.size / len(points)
                back = slope[:, None] * p["w2"] * (1 - hidden**2)
            net.reduce({"w1": x.T @ back, "b1": back.sum(0), "w2": hidden.T @ slope, "b2": slope.sum(keepdims=True)})
            rt.step()
            if step % 20 == 0:
                done = feed.push().wait()
                if rt.rank == 0:
                    kind = "whole" if done.is_full else f"{done.changed} values"
                    print(f"step {step:3}: version {done.version}, {kind}, {done.nbytes} bytes", flush=True)


def serve(where: str, seconds: float, until: int) -> None:
    """Take each new version as it comes; a server would answer requests between two of them."""
    reader = zr.Reader(where)
    x, is_inner = points_of(1, 500)
    served, ends = 0, time.monotonic() + seconds
    while served < until and time.monotonic() < ends:
        try:
            weights = reader.update()
        except CheckpointError:  # nothing was published yet
            time.sleep(0.05)
            continue
        if reader.version == served:
            time.sleep(0.05)
            continue
        served = reader.version
        odds, _ = odds_of({name.removeprefix("net."): one.astype(np.float32) for name, one in weights.items()}, x)
        right = np.mean((odds > 0.5) == is_inner)
        print(f"version {served} (update {reader.updates}): {right:.1%} of {len(x)} points right", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train and publish, or serve what is published.")
    parser.add_argument("role", choices=["train", "serve"])
    parser.add_argument("where", help="the directory that versions are published in")
    parser.add_argument("--steps", type=int, default=200, help="steps to train (default: 200)")
    parser.add_argument("--seconds", type=float, default=60, help="how long to serve (default: 60)")
    parser.add_argument("--until", type=int, default=10, help="the version after which serving ends (default: 10)")
    options = parser.parse_args()
    if options.role == "train":
        train(options.where, options.steps)
    else:
        serve(options.where, options.seconds, options.until)
