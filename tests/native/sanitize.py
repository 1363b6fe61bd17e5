"""Run the native code under ThreadSanitizer and AddressSanitizer, with ranks as threads: ``make sanitize``.

The harness (``main.cpp`` says what it does) compiles the sources of ``zerort/native/src`` that touch no Python, as they
are. A report of a sanitizer is a failure, and so is a check of the harness. ``MUTANTS`` are the test of the test: a
line of the sources is changed so that it is wrong, and the harness must fail.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "zerort/native/src"

# No clones: they are chosen before a sanitizer is ready, and it then crashes. The switches of CMakeLists.txt otherwise.
FLAGS = ["-std=c++17", "-O1", "-g1", "-pthread", "-fno-omit-frame-pointer", "-ffp-contract=off", "-DZERORT_CLONES="]
FLAGS += ["-Wall", "-Wextra", "-Wno-psabi"]
SANITIZERS = {
    "thread": ["-fsanitize=thread", "-DZERORT_PLAIN_STORES"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66 second_deadlock_stack=1",
    "ASAN_OPTIONS": "exitcode=66 detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}

# (sanitizer, file, what stands there, what makes it wrong)
MUTANTS = [
    ("thread", "meeting.h", "epoch.load(std::memory_order_acquire)", "epoch.load(std::memory_order_relaxed)"),
    (
        "thread",
        "meeting.cpp",
        "count.fetch_add(1, std::memory_order_acq_rel)",
        "count.fetch_add(1, std::memory_order_relaxed)",
    ),
    ("thread", "meeting.cpp", "turn_ = meets % 2;", "turn_ = 0;"),
    (
        "thread",
        "meeting.h",
        "std::atomic<std::uint32_t> target_{0};",
        "struct Plain { std::uint32_t v = 0; operator std::uint32_t() const { return v; } "
        "std::uint32_t load(std::memory_order = std::memory_order_seq_cst) const { return v; } "
        "void store(std::uint32_t x, std::memory_order = std::memory_order_seq_cst) { v = x; } "
        "void operator=(std::uint32_t x) { v = x; } } target_;",
    ),
    ("thread", "shortcut.h", "if (!parting) return kDone;", "if (parting || !parting) return kDone;"),
    ("thread", "shortcut.h", "peers_.half ^= 1;", "peers_.half = 0;"),
    (
        "thread",
        "sockets.cpp",
        "const std::lock_guard<std::mutex> lock(mutex_);\n  if (lacks_connection()) admit();",
        "if (lacks_connection()) admit();",
    ),
    ("address", "yields.h", "    saved_ns_ -= paid;\n", ""),
    ("address", "yields.h", "    was_late_ = true;\n", ""),
    ("address", "yields.h", "took > kLateNs", "took > kLateNs && !met"),
    ("address", "sockets.cpp", "    from.head_done = 0;\n    --", "    --"),
    ("address", "sockets.cpp", "if (is_late(from)) {", "if (false) {"),
    ("address", "sockets.cpp", "      one.from = one.instead.data();\n", ""),
    ("address", "shortcut.h", "0, out_.nbytes / route_.width);", "0, out_.nbytes / route_.width + 1);"),
    (
        "address",
        "crc32c.cpp",
        "for (; nbytes >= 8; p += 8, nbytes -= 8) state",
        "for (; nbytes >= 5; p += 8, nbytes -= nbytes < 8 ? nbytes : 8) state",
    ),
    ("address", "peers.cpp", "scratch_.resize(kBlockBytes * std::size_t(size()))", "scratch_.resize(kBlockBytes)"),
    ("address", "reduce.cpp", "const std::size_t rest = numel - i < n ? numel - i : n;", "const std::size_t rest = n;"),
    (
        "address",
        "memory.cpp",
        "const std::size_t head = -reinterpret_cast<std::uintptr_t>(target) % line;",
        "const std::size_t head = 0;",
    ),
]


def missing() -> str:
    """Say why nothing can be built here; nothing if it can."""
    if not compiler():
        return "there is no g++"
    with tempfile.TemporaryDirectory() as directory:
        for name, flags in SANITIZERS.items():
            program = Path(directory, name)
            build = [compiler(), *FLAGS, *flags, "-x", "c++", "-", "-o", str(program)]
            if subprocess.run(build, input="int main() {}", text=True, capture_output=True, check=False).returncode:
                return f"g++ has no runtime for -fsanitize={name}"
            if start(program, timeout=60).returncode:
                return f"a program with -fsanitize={name} does not start on this kernel"
    return ""


def compiler() -> str:
    """Return the compiler: CXX, or g++; empty if there is none."""
    return shutil.which(os.environ.get("CXX", "g++")) or ""


def start(program: Path, *arguments: object, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a program that has a sanitizer in it.

    Without randomized addresses, where they can be had: on kernels that randomize more bits than ThreadSanitizer
    expects (``vm.mmap_rnd_bits`` above 28) it finds its own addresses taken and ends.
    """
    command = [str(program), *map(str, arguments)]
    fixed = ["setarch", platform.machine(), "-R"]
    if shutil.which("setarch") and subprocess.run([*fixed, "true"], capture_output=True, check=False).returncode == 0:
        command = fixed + command
    return subprocess.run(
        command, env={**os.environ, **OPTIONS}, capture_output=True, text=True, timeout=timeout, check=False
    )


def build(name: str, directory: Path, *, sources: Path = SOURCES, jobs: int = 2) -> Path:
    """Compile the harness with the sanitizer ``name`` into ``directory``; return the program."""
    directory.mkdir(parents=True, exist_ok=True)
    files = [path for path in sorted(sources.glob("*.cpp")) if "nanobind" not in _with_headers(path)]
    flags = [compiler(), *FLAGS, *SANITIZERS[name], f"-I{sources}", f"-I{HERE}"]

    def compiled(path: Path) -> str:
        out = directory / f"{path.stem}.o"
        subprocess.run([*flags, "-c", str(path), "-o", str(out)], check=True)
        return str(out)

    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compiled, [*sorted(HERE.glob("*.cpp")), *files]))
    program = directory / f"harness-{name}"
    subprocess.run([*flags, *objects, "-o", str(program)], check=True)
    return program


def _with_headers(path: Path) -> str:
    """Return a source and the header of its name: what includes nanobind in either is about Python."""
    header = path.with_suffix(".h")
    return path.read_text() + (header.read_text() if header.exists() else "")


def mutate(directory: Path, file: str, old: str, new: str) -> Path:
    """Return a copy of the sources with one line changed."""
    shutil.copytree(SOURCES, directory)
    text = (directory / file).read_text()
    assert text.count(old) == 1, f"Expected {old!r} once in {file}, got {text.count(old)}: mend the list of mutants."
    (directory / file).write_text(text.replace(old, new))
    return directory


def main() -> int:
    """Run all seeds under both sanitizers, then the mutants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for the seeds of one sanitizer")
    parser.add_argument("--no-mutants", action="store_true")
    options = parser.parse_args()
    if reason := missing():
        print(f"Expected g++ with its sanitizers, got none: {reason}.")
        return 1
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        for name in SANITIZERS:
            began = time.monotonic()
            program = build(name, Path(directory, name))
            figures: Counter[str] = Counter()
            for seed in range(1, options.seeds + 1):
                done = start(program, seed, seed, options.rounds, timeout=options.timeout)
                if done.returncode:
                    failed += 1
                    print(f"{name}: seed {seed} failed with {done.returncode}:\n{done.stderr}")
                figures.update(
                    {key: int(value) for key, _, value in (line.partition("=") for line in done.stdout.split())}
                )
            counts = ", ".join(f"{value:,} {key}" for key, value in sorted(figures.items()))
            print(
                f"{name}: {options.seeds} seeds in {time.monotonic() - began:.0f} s: {counts}; {failed} failed so far",
                flush=True,
            )
        for number, (name, *change) in enumerate([] if options.no_mutants else MUTANTS):
            sources = mutate(Path(directory, f"mutant{number}"), *change)
            program = build(name, Path(directory, f"mutant{number}-built"), sources=sources)
            verdict = judge(program, seeds=10)
            failed += verdict == "survived"
            print(f"mutant {change[0]}: {change[2]}: {verdict}", flush=True)
    return 1 if failed else 0


def judge(program: Path, *, seeds: int) -> str:
    """Say by what a mutant was found, or that it survived."""
    for seed in range(1, seeds + 1):
        try:
            done = start(program, seed, seed, 200, timeout=120)
        except subprocess.TimeoutExpired:
            return f"hung at seed {seed}"
        if done.returncode == 66:
            return f"reported by the sanitizer at seed {seed}"
        if done.returncode:
            return f"found by a check at seed {seed}"
    return "survived"


if __name__ == "__main__":
    sys.exit(main())
