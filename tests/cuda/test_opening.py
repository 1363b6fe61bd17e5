"""A group over GPUs that cannot be opened on one rank is the same error on every rank: nothing hangs."""

import pytest

pytest.importorskip("cupy")

from gpu_jobs import ranks_that

from zerort.testing.jobs import run_job


def test_more_ranks_than_gpus_are_refused_together(job):
    result = job(
        3,
        """
        try:
            open_group()
        except DeviceError as error:
            say("rank", rank, "raised", "GPU for each of 3 ranks on a host, got ranks 0 and 2 both" in str(error))
        """,
        devices=2,
    )
    assert ranks_that("raised True", result.output) == ["0", "1", "2"], result.output


def test_several_ranks_share_a_gpu_when_asked(job):
    result = job(
        3,
        """
        import cupy
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        with open_group() as group:
            say("rank", rank, "sums", int(group.all_reduce(cupy.ones(3, np.int32)).wait()[0]), group.device.name)
        """,
        devices=2,
        nccl_version=23000,
    )
    assert ranks_that("sums 3 cuda:0", result.output) == ["0", "2"], result.output
    assert ranks_that("sums 3 cuda:1", result.output) == ["1"], result.output


@pytest.mark.parametrize(
    ("version", "asking", "why"),
    [
        (23000, 1, "set NCCL_MULTI_RANK_GPU_ENABLE=1 on every rank"),
        (22703, 2, "wants NCCL 2.30 or later, and there is 2.27.3"),
    ],
)
def test_ranks_do_not_share_a_gpu_unless_all_ask_and_nccl_can(job, version, asking, why):
    result = job(
        2,
        f"""
        if rank < {asking}:
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        try:
            open_group()
        except DeviceError as error:
            say("rank", rank, "raised", "ranks 0 and 1 both on GPU" in str(error), {why!r} in str(error))
        """,
        devices=1,
        nccl_version=version,
    )
    assert ranks_that("raised True True", result.output) == ["0", "1"], result.output


def test_a_rank_without_cupy_is_an_error_on_every_rank(job):
    result = job(
        2,
        """
        if rank == 1:
            sys.modules["cupy"] = None
        try:
            open_group()
        except DeviceError as error:
            say("rank", rank, "raised", "pip install 'cupy-cuda12x[ctk]'" in str(error), "(rank 1)" in str(error))
        """,
    )
    assert ranks_that("raised True True", result.output) == ["0", "1"], result.output


def test_a_host_without_gpus_is_told_so(job):
    result = job(
        1,
        """
        try:
            open_group()
        except DeviceError as error:
            say("rank", rank, "raised", "Expected a GPU, got no GPU here" in str(error), "--gpus all" in str(error))
        """,
        devices=0,
    )
    assert ranks_that("raised True True", result.output) == ["0"], result.output


def test_cupy_without_a_driver_is_told_so(tmp_path):
    """CuPy as it is, not on the emulated device: it has no NCCL, either, and that is not what is missing."""
    script = tmp_path / "job.py"
    script.write_text('import zerort as zr\nzr.open_group(kind="nccl")')
    result = run_job(2, [script], timeout=60.0, env={"CUDA_VISIBLE_DEVICES": "", "CUDA_PATH": "", "PYTHONPATH": ""})
    assert result.code != 0
    assert "DeviceError: Expected a GPU, got no GPU here: cudaError" in result.output, result.output
    assert 'leave kind="nccl" out' in result.output
    assert "get_version" not in result.output


def test_cupy_without_libnccl_is_told_so(job):
    """CuPy 14 then has a module without functions."""
    result = job(
        1,
        """
        import types
        import cupy
        sys.modules["cupy.cuda.nccl"] = cupy.cuda.nccl = types.SimpleNamespace(available=False)
        try:
            open_group()
        except DeviceError as error:
            say("rank", rank, "raised", "got: CuPy finds no libnccl.so.2. Run pip install nvidia-nccl" in str(error))
        """,
    )
    assert ranks_that("raised True", result.output) == ["0"], result.output


def test_cupy_without_nccl_is_told_so(job):
    result = job(
        2,
        """
        if rank == 0:
            sys.modules["cupy.cuda.nccl"] = None
            from zerort.device.cuda.report import describe_gpus
            facts = describe_gpus()
            say("the doctor knows", facts["nccl"], "nvidia-nccl-cu12" in facts["nccl_error"], not facts["pin_error"])
        try:
            open_group()
        except DeviceError as error:
            say("rank", rank, "raised", "pip install nvidia-nccl-cu12" in str(error), "(rank 0)" in str(error))
        """,
    )
    assert "the doctor knows None True True" in result.output, result.output
    assert ranks_that("raised True True", result.output) == ["0", "1"], result.output


def test_a_rank_that_cannot_join_nccl_is_an_error_on_every_rank(job):
    """Rank 1 may not open the file through which it would join, so rank 0 waits for it until time is up."""
    result = job(
        2,
        """
        import resource
        from mpi4py import MPI
        from zerort.comm.bootstrap.opening import best_transport
        from zerort.comm.transports.nccl.opening import open_nccl
        from zerort.device.cuda.device import CudaDevice
        from zerort.device.cuda.library import load_nccl
        host = best_transport(MPI.COMM_WORLD, name="world", options=zr.GroupOptions(timeout=12.0))
        device = CudaDevice(rank)
        load_nccl()
        import zerort.comm.transports.nccl.transport
        if rank == 1:
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
        try:
            open_nccl(host, device, owns_device=True)
        except BootstrapError as error:
            say("rank", rank, "raised", type(error).__name__, str(error))
        MPI.COMM_WORLD.Barrier()  # a launcher ends all ranks with the first that does not say goodbye
        os._exit(0)
        """,
    )
    assert ranks_that("raised BootstrapError .*(?:NCCL|Nccl)", result.output) == ["0", "1"], result.output


def test_gpus_that_are_slow_to_open_are_no_missing_ranks(job):
    """Each step has time of its own: all of them together may take longer than the timeout."""
    result = job(
        2,
        """
        import importlib.abc
        class Slow(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name in ("zerort.device.cuda.device", "zerort.comm.transports.nccl.transport"):
                    time.sleep(5)
        sys.meta_path.insert(0, Slow())
        with open_group(timeout=8.0) as group:
            say("rank", rank, "opened", group.kind)
        """,
    )
    assert result.code == 0, result.output
    assert ranks_that("opened nccl", result.output) == ["0", "1"], result.output


@pytest.mark.parametrize("kind", ["node", "mpi"], ids=["on-a-board", "in-messages"])  # "mpi" is a marker
def test_a_long_error_while_opening_is_told_to_every_rank(job, kind):
    """What a compiler or a linker says goes on for pages, and not in ASCII."""
    result = job(
        2,
        f"""
        from mpi4py import MPI
        from zerort.comm.bootstrap.opening import best_transport
        from zerort.comm.transports.nccl.opening import _together
        host = best_transport(MPI.COMM_WORLD, name="world", options=zr.GroupOptions(timeout=5.0), kind="{kind}")
        def step():
            if rank == 1:
                raise OSError("no library: " + chr(0x1F600) * 9000)
        try:
            _together(host, step)
        except BootstrapError as error:
            say("rank", rank, "raised", "OSError: no library" in str(error), "(rank 1)" in str(error))
        host.close()
        """,
    )
    assert ranks_that("raised True True", result.output) == ["0", "1"], result.output
