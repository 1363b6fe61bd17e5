"""A child that a rank has forked uses nothing of its parent's, and ends at once, however it ends."""

from __future__ import annotations

from zerort.checkpoint import read_manifest, verify

JOB = """
import multiprocessing, threading

NVME = zr.Tier.NVME
OPTIONS = zr.OffloadOptions(chunk_nbytes=8192, threads=2)
DIRECTORY = sys.argv[1]

def refused(verb):
    try:
        verb()
    except ForkedError as error:
        assert "Expected" in str(error) and "forked child" in str(error), error
        return
    raise AssertionError(f"{verb} went through")

def files():
    return sorted(f"{where}/{name}" for where, _, names in os.walk(DIRECTORY) for name in names)

with zr.open(
    plan=zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME), optimizer=zr.AdamW(lr=0.1),
    scratch=f"{DIRECTORY}/scratch", create_scratch=True, offload=OPTIONS, last_step=f"{DIRECTORY}/last",
) as rt:
    unit = rt.register("unit", {"w": np.ones(9000, np.float32)})

    def step():
        unit.reduce({"w": np.ones(9000, np.float32)})
        rt.step()

    def look():
        \"\"\"What a child may try, and is refused.\"\"\"
        for verb in (
            step, lambda: rt.save(f"{DIRECTORY}/c"), lambda: rt.load(f"{DIRECTORY}/last"), rt.resume,
            lambda: unit.gathered().__enter__(),
            lambda: rt.register("other", {"w": np.ones(3)}), rt.discard_gradients, rt.group.barrier,
            lambda: rt.group.all_reduce(np.ones(3)), lambda: rt.group.split(0), lambda: rt.group.zeros(3, "float32"),
            lambda: rt.context.storage.store.create("v", 100), rt.context.storage.store.flush, ticket.wait,
        ):
            refused(verb)
        rt.close()
        rt.group.close()
        rt.context.storage.close()

    step()
    before = files()
    for how in ("exit", "raise", "_exit", "return"):
        rt.group.barrier().wait()
        gate = threading.Event()
        ticket = rt.context.backings.gradient_stream.submit(gate.wait)  # under way while the child is made
        child = os.fork()
        if child == 0:
            look()
            if how == "exit":
                sys.exit(7)
            if how == "raise":
                raise KeyError("of a child")
            if how == "_exit":
                os._exit(7)
            break  # on the parent's way, to the end of the program
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        gate.set()
        ticket.wait()
        rt.group.barrier().wait()
        assert files() == before, set(files()) ^ set(before)
        say("child", how, "ended with", code)
    else:
        gate = threading.Event()
        ticket = rt.context.backings.gradient_stream.submit(gate.wait)
        worker = multiprocessing.get_context("fork").Process(target=look)
        worker.start()
        worker.join()
        gate.set()
        say("child", "worker", "ended with", worker.exitcode)
        step()
        step()
        say("parent went on to", rt.updates)
"""


def test_children_that_end_by_any_way_take_nothing_with_them_and_wait_for_nobody(tmp_path, job):
    result = job(2, JOB, args=[tmp_path / "run"])
    assert result.code == 0, result.output
    codes = {"exit": 7, "raise": 1, "_exit": 7, "return": 0, "worker": 0}
    for how, code in codes.items():
        assert result.output.count(f"child {how} ended with {code}") == 2, result.output
    assert result.output.count("parent went on to 3") == 2, result.output
    assert result.output.count("KeyError: 'of a child'") == 2, result.output
    assert "ending all ranks" not in result.output
    assert read_manifest(tmp_path / "run" / "last").meta["updates"] == 3
    assert verify(tmp_path / "run" / "last") == []
    assert list((tmp_path / "run" / "scratch").iterdir()) == []
