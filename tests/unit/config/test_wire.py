"""How bytes travel is a value that checks itself; names are those of the codecs."""

import pickle

import pytest

import zerort as zr
from zerort.buffer import DifferenceCodes
from zerort.codec import FORMATS
from zerort.config.wire import WIRE_FORMATS
from zerort.engine.wire.coding import Coding, range_codec
from zerort.errors import CallError
from zerort.layout.flat import ALIGNMENT


def test_a_wire_names_codecs_that_there_are() -> None:
    assert set(WIRE_FORMATS) == set(FORMATS)
    assert zr.Wire(gather="bf16") == zr.Wire(gather="bfloat16")
    wire = zr.Wire(gather="int8", reduce="int4", feedback=True, over="all")
    assert eval(repr(wire), {"Wire": zr.Wire}) == pickle.loads(pickle.dumps(wire)) == wire


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "Expected Wire(gather=), Wire(reduce=) or both, got neither. Leave wire= out instead."),
        ({"gather": "fp8"}, "Expected Wire(gather=) to be one of 'int8', 'int4', 'bfloat16', 'delta', got 'fp8'."),
        ({"gather": 8}, "Expected Wire(gather=) to be one of 'int8', 'int4', 'bfloat16', 'delta', got 8."),
        (
            {"reduce": "fp8"},
            "Expected Wire(reduce=) to be one of 'int8', 'int4', 'bfloat16', or zr.TopK(0.01), got 'fp8'.",
        ),
        (
            {"gather": zr.TopK(0.1)},
            "Expected Wire(gather=) to be one of 'int8', 'int4', 'bfloat16', 'delta', got TopK(0.1).",
        ),
        (
            {"reduce": "delta"},
            "Expected Wire(reduce=) to be one of 'int8', 'int4', 'bfloat16', or zr.TopK(0.01), got 'delta'.",
        ),
        (
            {"gather": "int8", "feedback": True},
            "Expected Wire(feedback=True) with reduce= or gather='int4', whose losses it makes up for, or "
            "feedback='reduce' or 'gather' with that one; got feedback=True, reduce=None and gather='int8'.",
        ),
        ({"reduce": "int8", "feedback": "gather"}, "Expected Wire(feedback=True) with reduce= or gather='int4'"),
        ({"gather": "int4", "feedback": "reduce"}, "Expected Wire(feedback=True) with reduce= or gather='int4'"),
        ({"gather": "int4", "feedback": "both"}, "Expected Wire(feedback=True) with reduce= or gather='int4'"),
        ({"reduce": "int8", "feedback": 1}, "Expected Wire(feedback=True) with reduce= or gather='int4', whose losses"),
        ({"gather": "int8", "over": "nodes"}, "Expected Wire(over=) to be 'hosts' or 'all', got 'nodes'."),
    ],
)
def test_others_are_refused(fields, message) -> None:
    with pytest.raises(CallError) as error:
        zr.Wire(**fields)
    assert str(error.value).startswith(message)


def test_top_k_keeps_what_it_does_not_send_unless_told() -> None:
    wire = zr.Wire(reduce=zr.TopK(0.01))
    assert wire.feedback is True
    assert zr.Wire(reduce=zr.TopK(0.01), feedback=False).feedback is False
    assert zr.Wire(reduce="int4").feedback is False
    assert zr.Wire(gather="int4", reduce=zr.TopK(0.01)).keeps_residuals
    assert not zr.Wire(gather="int4", reduce="int4", feedback="gather").keeps_residuals
    assert eval(repr(wire), {"Wire": zr.Wire, "TopK": zr.TopK}) == pickle.loads(pickle.dumps(wire)) == wire


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, "1%", True, None, float("nan")])
def test_top_k_of_nothing_is_refused(fraction) -> None:
    with pytest.raises(
        CallError, match=r"Expected TopK of a number above 0 and at most 0.5, got .* TopK\(0.01\) is 1 %"
    ):
        zr.TopK(fraction)


@pytest.mark.parametrize(
    ("over", "one_memory", "virtual_shards", "codes"),
    [
        ("hosts", True, None, False),
        ("hosts", False, None, True),
        ("hosts", True, 8, True),
        ("all", True, None, True),
    ],
)
def test_shared_memory_is_not_coded_unless_all_is(over, one_memory, virtual_shards, codes) -> None:
    wire = zr.Wire(gather="int8", over=over)
    coding = Coding.of(wire, one_host=one_memory, virtual_shards=virtual_shards)
    assert (coding is not None) == codes
    assert Coding.of(None, one_host=False, virtual_shards=8) is None


@pytest.mark.parametrize(
    ("over", "one_memory", "virtual_shards", "sends"),
    [("hosts", True, None, False), ("hosts", True, 8, False), ("hosts", False, 8, True), ("all", True, None, True)],
)
def test_deltas_are_exact_and_so_only_where_bytes_travel(over, one_memory, virtual_shards, sends) -> None:
    coding = Coding.of(zr.Wire(gather="delta", over=over), one_host=one_memory, virtual_shards=virtual_shards)
    assert (coding is not None) == sends
    if coding is not None:
        assert [coding.sends_deltas(dtype) for dtype in ("bfloat16", "float16", "int32")] == [True, True, False]
        assert coding.alignment == ALIGNMENT  # as without: deltas have no blocks


def test_deltas_beside_sums_that_are_coded_in_shared_memory_too_are_not_sent() -> None:
    wire = zr.Wire(gather="delta", reduce="int8")
    coding = Coding.of(wire, one_host=True, virtual_shards=8)
    assert coding is not None
    assert not coding.sends_deltas("bfloat16")
    assert coding.describe(gathered=["bfloat16"], reduced=["float32"]) == "reduce int8"


@pytest.mark.parametrize(
    ("wire", "differs"),
    [
        (zr.Wire(gather="int4", feedback=True, over="all"), True),
        (zr.Wire(gather="int4", reduce="int4", feedback="gather", over="all"), True),
        (zr.Wire(gather="int4", reduce="int4", feedback="reduce", over="all"), False),
        (zr.Wire(gather="int4", reduce=zr.TopK(0.1), over="all"), False),  # whose feedback is of gradients
        (zr.Wire(gather="int4", reduce=zr.TopK(0.1), feedback=True, over="all"), True),
        (zr.Wire(gather="int4", reduce="int4", over="all"), False),
        (zr.Wire(gather="int8", reduce="int4", feedback=True, over="all"), False),
        (zr.Wire(reduce="int4", feedback=True, over="all"), False),
    ],
)
def test_of_gathers_feedback_is_for_int4_alone(wire, differs) -> None:
    coding = Coding.of(wire, one_host=True, virtual_shards=None)
    assert coding is not None
    assert wire.keeps_whole == differs
    for dtype, has_codes in {"float32": True, "bfloat16": True, "float16": False, "int32": False}.items():
        assert coding.sends_differences(dtype) == coding.keeps_whole(dtype) == (differs and has_codes)
        assert isinstance(range_codec(coding, dtype, is_sparse=False), DifferenceCodes) == (differs and has_codes)


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (zr.Wire(gather="int4", feedback=True), "gather int4, feedback"),
        (zr.Wire(gather="int4", reduce="int4", feedback=True), "gather int4, reduce int4, feedback of both"),
        (zr.Wire(gather="int8", reduce="int4", feedback=True), "gather int8, reduce int4, feedback"),
        (zr.Wire(gather="int4", reduce="int4"), "gather int4, reduce int4"),
    ],
)
def test_reports_say_what_feedback_is_of(wire, said) -> None:
    coding = Coding.of(wire, one_host=False, virtual_shards=8)
    assert coding is not None
    assert coding.describe(gathered=["float32", "int64"], reduced=["float32"]) == said


def test_options_refuse_what_is_no_wire() -> None:
    with pytest.raises(CallError, match=r"Expected wire to be one such as zr.Wire\(gather='int8'\), got 'int8'"):
        zr.open(wire="int8")
