"""Several groups on each GPU: they take turns, they fail alone, and one that cannot be opened leaves the others be."""

import pytest

pytest.importorskip("cupy")

import hardware
from gpu_jobs import ranks_that


@pytest.mark.parametrize(("ranks", "seed"), [(2, 1), (3, 2)])
def test_groups_take_turns_on_every_gpu_in_the_order_of_the_program(job, tmp_path, ranks, seed):
    """Threads and streams are late at random, so only an order that is kept is the same on all ranks."""
    result = job(
        ranks,
        """
        import cupy
        world = open_group(timeout=20.0)
        half = world.split(0 if rank < 2 else 1, name="half")
        mates = [0, 1] if rank < 2 else [2]
        for turn in range(8):
            first, second = (half, world) if turn % 3 else (world, half)
            given = [cupy.asarray(np.full(numel, rank + 1.0, np.float32)) for numel in (200_000, 70_001)]
            tickets = [(group, group.all_reduce(array)) for array in given for group in (first, second)]
            for group, ticket in tickets:
                members = mates if group is half else range(world.size)
                assert (ticket.wait().get() == sum(member + 1 for member in members)).all(), (turn, group)
        world.close()
        say("rank", rank, "is right")
        """,
        seed=seed,
        report=tmp_path,
    )
    assert result.code == 0, result.output
    assert ranks_that("is right", result.output) == [str(rank) for rank in range(ranks)], result.output
    assert hardware.findings_in(tmp_path) == []


@hardware.only_emulated("a limit of communicators")
def test_a_part_that_cannot_be_opened_leaves_the_whole_usable(job):
    """Rank 1 may open one communicator, which the whole has: the error is every rank's, whatever its color."""
    result = job(
        3,
        """
        if rank == 1:
            os.environ["CUSIM_NCCL_COMMUNICATORS"] = "1"
        import cupy
        group = open_group(timeout=3.0)
        for color in (0 if rank < 2 else 1), None if rank == 0 else 1:
            try:
                group.split(color, name="part")
            except BootstrapError as error:
                say("rank", rank, "raised", "every part that group 'world'" in str(error), "of 'part'" in str(error))
            say("rank", rank, "sums", int(group.all_reduce(cupy.ones(3, np.int32)).wait()[0]))
        part = group.split(None if rank == 1 else 0)
        say("rank", rank, "has", part and int(part.all_reduce(cupy.ones(3, np.int32)).wait()[0]))
        group.close()
        """,
    )
    assert result.code == 0, result.output
    assert ranks_that("raised True True", result.output) == ["0", "0", "1", "1", "2", "2"], result.output
    assert ranks_that("sums 3", result.output) == ["0", "0", "1", "1", "2", "2"], result.output
    assert ranks_that("has 2", result.output) == ["0", "2"], result.output


def test_a_group_that_is_stuck_holds_up_no_other_for_ever(job):
    """On rank 0 the thread of one group does not come back from NCCL. Two others wait for their turns behind it."""
    result = job(
        2,
        """
        import cupy, threading
        stuck, quick, patient = (open_group(timeout=timeout) for timeout in (60.0, 3.0, 60.0))
        gate, stream = threading.Event(), stuck._transport._stream
        if rank == 0:
            ticket = stream.submit(lambda: (stream.take_turn(), gate.wait(50)))
            norm = patient.all_reduce(cupy.ones(10), name="norm")
        else:
            patient.close()
        try:
            quick.all_reduce(cupy.ones(10), name="loss").wait()
        except (CollectiveTimeoutError, RankFailedError) as error:
            say("rank", rank, "gave up", "'loss'" in str(error), error)
        if rank == 0:
            try:
                norm.wait()
            except RankFailedError as error:
                say("rank", rank, "heard", "'norm'" in str(error), "rank 1: gone" in str(error))
            gate.set()
            ticket.wait()
        say("rank", rank, "goes on", int(stuck.all_reduce(cupy.ones(3, np.int32)).wait()[0]))
        for group in (patient, quick, stuck):
            group.close()
        """,
    )
    assert result.code == 0, result.output
    assert ranks_that("gave up True", result.output) == ["0", "1"], result.output
    assert ranks_that("heard True True", result.output) == ["0"], result.output
    assert ranks_that("goes on 2", result.output) == ["0", "1"], result.output
