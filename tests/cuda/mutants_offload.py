"""Waits and events of what passes between a GPU and its host, or a disk; see `mutants.py`."""

from mutant import Mutant

STAGING, STORES, ORDER = "test_staging.py", "test_stores.py", "test_store_order.py"
PIPELINE = "test_pipeline_order.py"

OFFLOAD = (
    # -- staging ---------------------------------------------------------------------------------------------------
    Mutant(
        "streaming/staging.py",
        'self._pending.append(lane.submit(_nothing, name=f"{self.name} begins", eager=True))',
        'self._pending.append(lane.submit(_nothing, name=f"{self.name} begins", eager=True, after=()))',
        (STAGING, "adamw_over_state_on_the_host"),
    ),
    Mutant(
        "streaming/staging.py",
        'careful.call(number, laid.arrays), name=f"{self.name} {number}", eager=True, after=laid.filled',
        'careful.call(number, laid.arrays), name=f"{self.name} {number}", eager=True, after=()',
        (STAGING, "adamw_over_state_on_the_host"),
    ),
    Mutant(
        "streaming/staging.py",
        "laid.slot.busy = self._copy(back, lane=copy_out, after=[computed])",
        "laid.slot.busy = self._copy(back, lane=copy_out, after=())",
        (STAGING, "adamw_over_state_on_the_host"),
    ),
    Mutant(
        "streaming/staging.py",
        "self._device.arrive(computed)  # raises what compute raised: no chunk behind that one was computed",
        "pass",
        (STAGING, "adamw_over_state_on_the_host"),
    ),
    Mutant(
        "streaming/staging.py",
        'ended = copy_out.submit(_nothing, name=f"{self.name} ends", eager=True, after=[computed])',
        'ended = copy_out.submit(_nothing, name=f"{self.name} ends", eager=True, after=())',
        (STAGING, "the_host_computes_with_what_is_no_longer_read"),
    ),
    Mutant(
        "streaming/staging.py",
        "self._runs[-1].ended.wait()",
        "pass",
        (STAGING, "the_host_computes_with_what_is_no_longer_read"),
    ),
    Mutant(
        "streaming/staging.py",
        "joined(laid.filled, result=None).wait()",
        "pass",
        (STAGING, "adamw_over_state_on_the_host"),
    ),
    Mutant(
        "streaming/staging.py",
        "self._device.arrive(ticket)",
        "pass",
        (STAGING, "the_callers_stream_waits_for_what_the_host_computed"),
    ),
    Mutant(
        "streaming/staging.py",
        "return _Laid(number, slot, arrays, moves, self._copy(there, lane=lane, after=slot.busy))",
        "return _Laid(number, slot, arrays, moves, self._copy(there, lane=lane, after=()))",
        (STAGING, "something_comes_and_nothing_goes_back"),
    ),
    Mutant(
        "streaming/staging.py",
        "tickets = [self._device.copy(source, out=out, stream=lane, after=after) for source, out in pairs]",
        "tickets = [self._device.copy(source, out=out, stream=lane, after=()) for source, out in pairs]",
        (STAGING, "adamw_over_state_on_the_host"),
    ),
    Mutant(
        "streaming/staging.py",
        "self._pending.append(lane.after(run.ended))",
        "pass",
        (STAGING, "arrays_of_the_host_are_in_order_from_run_to_run"),
    ),
    Mutant(
        "streaming/staging.py",
        "joined(tuple(self._pending), result=None).wait()",
        "pass",
        (STAGING, "adamw_over_state_on_the_host"),
    ),
    Mutant("streaming/staging.py", "ticket.wait()", "pass", (STAGING, "an_error_leaves_nothing_under_way")),
    Mutant("streaming/staging.py", "self.finish()", "pass", (ORDER, "a_staging_closes_behind_its_copies")),
    # -- bridged stores --------------------------------------------------------------------------------------------
    Mutant("storage/stores/bridged.py", "asked = self.busy.wait()", "asked = None", (STORES, "TestBehindABridge")),
    Mutant(
        "storage/stores/bridged.py",
        "asked.wait()",
        "pass",
        (ORDER, "a_slot_is_not_filled_while_a_disk_reads_it"),
    ),
    Mutant(
        "storage/stores/bridged.py", "slot = next(self._in_slots)\nslot.wait()", "pass", (STORES, "TestBehindABridge")
    ),
    Mutant(
        "storage/stores/bridged.py",
        "slot = next(self._out_slots)\nslot.wait()",
        "pass",
        (ORDER, "a_slot_is_not_filled_while_a_disk_reads_it"),
    ),
    Mutant(
        "storage/stores/bridged.py",
        "slot.busy = self._gpu.copy(place, out=part, stream=self._in, after=[called, come], eager=False)",
        "slot.busy = self._gpu.copy(place, out=part, stream=self._in, after=[come], eager=False)",
        (ORDER, "what_the_caller_has_queued_comes_first"),
    ),
    Mutant(
        "storage/stores/bridged.py",
        "slot.busy = self._gpu.copy(place, out=part, stream=self._in, after=[called, come], eager=False)",
        "slot.busy = self._gpu.copy(place, out=part, stream=self._in, after=[called], eager=False)",
        (STORES, "TestBehindABridge"),
    ),
    Mutant("storage/stores/bridged.py", "come.wait()", "pass", (STORES, "TestBehindABridge")),
    Mutant(
        "storage/stores/bridged.py",
        "come = self._gpu.copy(part, out=place, stream=self._out, after=[called])",
        "come = self._gpu.copy(part, out=place, stream=self._out, after=())",
        (ORDER, "what_the_caller_has_queued_comes_first"),
    ),
    Mutant(
        "storage/stores/bridged.py",
        'called = self._calls.submit(_nothing, name=f"call {name}", eager=True)',
        'called = self._calls.submit(_nothing, name=f"call {name}", eager=True, after=())',
        (ORDER, "what_the_caller_has_queued_comes_first"),
    ),
    Mutant(
        "storage/stores/bridged.py",
        "self._passages.append(passage := Passage(name, begin, end, writes=writes, after=after))",
        "self._passages.append(passage := Passage(name, begin, end, writes=writes, after=()))",
        (ORDER, "a_read_comes_after_the_write_before_it"),
    ),
    Mutant("storage/stores/bridged.py", "passage.wait()", "pass", (STORES, "a_write_that_failed_is_told")),
    Mutant(
        "storage/stores/bridged.py",
        "passage.asked.wait()",
        "pass",
        (ORDER, "a_value_goes_after_what_was_asked_of_it"),
    ),
    Mutant(
        "storage/stores/passage.py", "earlier.asked.wait()", "pass", (ORDER, "a_read_comes_after_the_write_before_it")
    ),
    Mutant("storage/stores/passage.py", "super().wait(timeout)", "pass", (STORES, "TestBehindABridge")),
    Mutant("storage/stores/passage.py", "super().wait()", "pass", (STORES, "a_write_that_failed_is_told")),
    Mutant("storage/stores/later.py", "if not self.asked.wait(timeout):", "if False:", (STORES, "TestBehindABridge")),
    Mutant(
        "storage/stores/later.py",
        "joined(self.parts, result=None).wait(None if until is None else max(0.0, until - time.monotonic()))",
        "pass",
        (STORES, "TestBehindABridge"),
    ),
    # -- the pipeline ----------------------------------------------------------------------------------------------
    Mutant(
        "streaming/run.py", 'with self._stalled("wait"):\nticket.wait()', "pass", (PIPELINE, "what_a_run_has_written")
    ),
    Mutant("streaming/run.py", "for read in fed.reads:\nread.wait()", "pass", (PIPELINE, "what_a_run_has_written")),
    Mutant("streaming/run.py", "joined(fed.reads, result=None).wait()", "pass", (PIPELINE, "what_a_run_has_written")),
    Mutant(
        "streaming/run.py",
        'with self._stalled("drain"):\nself._pipeline.finish()',
        "pass",
        (PIPELINE, "what_a_run_has_written"),
    ),
    Mutant(
        "streaming/run.py",
        "with contextlib.suppress(Exception):\nticket.wait()",
        "pass",
        (PIPELINE, "nothing_is_asked_of_a_store"),
    ),
    Mutant(
        "streaming/run.py",
        "with contextlib.suppress(Exception):\nread.wait()",
        "pass",
        (PIPELINE, "slots_are_free_when_a_run_has_failed"),
    ),
    Mutant(
        "streaming/run.py",
        "with contextlib.suppress(Exception):\nself._pipeline.finish()",
        "pass",
        (PIPELINE, "slots_are_free_when_a_run_has_failed"),
    ),
    Mutant(
        "streaming/slots.py", "joined(self.writes, result=None).wait()", "pass", (STORES, "state_on_a_disk_streams")
    ),
    Mutant(
        "streaming/slots.py",
        "joined([ticket for slot in self._all for ticket in slot.writes], result=None).wait()",
        "pass",
        (PIPELINE, "what_a_run_has_written"),
    ),
    Mutant("streaming/pipeline.py", "self.finish()", "pass", (PIPELINE, "slots_are_free_when_a_pipeline_is_closed")),
    Mutant("streaming/pipeline.py", "later.attempt(ticket.wait)", "pass", (PIPELINE, "what_a_run_leaves_to_the_gpu")),
    Mutant("streaming/pipeline.py", "self._writer.synchronize()", "pass", (PIPELINE, "what_a_run_leaves_to_the_gpu")),
    # -- stores in memory ------------------------------------------------------------------------------------------
    Mutant(
        "testing/memory_store.py",
        'self._stream.submit(lambda: value.fill(0), name=f"create {name}").wait()',
        'self._stream.submit(lambda: value.fill(0), name=f"create {name}")',
        (ORDER, "a_value_that_was_made_can_be_looked_at"),
    ),
    Mutant(
        "testing/memory_store.py",
        "self._writes.pop(0).wait()",
        "self._writes.pop(0)",
        (ORDER, "what_was_flushed_can_be_looked_at"),
    ),
)

NOT_OF_THE_GPU = {
    "streaming/staging.py": {
        "self._pending.popleft().wait()  # raises what it raised": "it is done",
    },
    "streaming/slots.py": {
        "ticket.wait()": "it is done",
    },
    "storage/stores/bridged.py": {
        'f"{type(lost[0]).__name__}: {lost[0]}. Call wait() on every ticket, or flush().",': "words",
    },
    "testing/memory_store.py": {
        '...     store.read("a", np.empty(4, "float32")).wait()': "an example",
        "self._stream.synchronize()": "a stream holds the arrays of its work, also of a value that is gone",
    },
}
"""Lines that look like synchronisations, and why they are none between a host and its GPU."""
