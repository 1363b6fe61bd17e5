"""Arguments of ``zerort bench``: one command for each benchmark."""

from __future__ import annotations

from zerort.cli.arguments import Commands, serve_help
from zerort.cli.bench.collectives.arguments import add_bench_collectives
from zerort.cli.bench.copies.arguments import add_bench_copies
from zerort.cli.bench.disk.arguments import add_bench_checkpoint, add_bench_nvme, add_bench_offload
from zerort.cli.bench.hosts.arguments import add_bench_hosts
from zerort.cli.bench.optimizer.arguments import add_bench_optimizer
from zerort.cli.bench.step.arguments import add_bench_step
from zerort.cli.bench.wire.arguments import add_bench_wire

__all__ = ["add_bench"]


def add_bench(commands: Commands) -> None:
    """Add ``zerort bench`` and all benchmarks."""
    bench = commands.add_parser(
        "bench",
        help="measure collectives, optimizers, training steps, checkpoints, offload or codecs",
        description="Measure this machine.",
    )
    serve_help(bench)
    benches = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK")
    add_bench_collectives(benches)
    add_bench_optimizer(benches)
    add_bench_step(benches)
    add_bench_checkpoint(benches)
    add_bench_nvme(benches)
    add_bench_offload(benches)
    add_bench_copies(benches)
    add_bench_wire(benches)
    add_bench_hosts(benches)
