"""Waits and events of the device, its streams, the groups over GPUs and their watch; see `mutants.py`."""

from mutant import Mutant

DEVICE, WATCH, GROUPS = "test_device.py", "test_watch.py", "ranks/test_groups_on_gpus.py"

DEVICE_AND_GROUPS = (
    # -- the order of groups ---------------------------------------------------------------------------------------
    Mutant(
        "device/cuda/order.py",
        "return self._moved.wait_for(lambda: self._first >= number, _EVERY)",
        "return True",
        (DEVICE, "take_turns_on_the_host"),
    ),
    Mutant(
        "device/cuda/order.py",
        "found = trouble()",
        "found = None",
        (DEVICE, "who_gives_up_leaves_the_line"),
    ),
    Mutant("device/cuda/order.py", "stream.wait_event(self._line._last)", "pass", (DEVICE, "take_turns_on_the_gpu")),
    Mutant("device/cuda/order.py", "self._line._last = event", "pass", (DEVICE, "take_turns_on_the_gpu")),
    Mutant(
        "comm/transports/nccl/transport.py",
        "self._stream.take_turn()",
        "pass",
        (GROUPS, "a_group_of_parts_works_beside_its_whole"),
        ranks=2,
    ),
    Mutant(
        "comm/transports/nccl/transport.py",
        "order=order_of_nccl(self.device.ordinal),",
        "order=None,",
        (GROUPS, "a_group_of_parts_works_beside_its_whole"),
        ranks=2,
    ),
    # -- captures, and the end of a communicator -------------------------------------------------------------------
    Mutant(
        "device/cuda/library.py",
        "before = _meet_captures(_RELAXED)",
        "before = _meet_captures(0)",
        ("test_captures.py", "whoever_asks_for_work"),
    ),
    Mutant(
        "device/cuda/stream.py",
        "self.host = HostStream(name, helping=helping, begin=allow_captures)",
        "self.host = HostStream(name, helping=helping)",
        ("test_captures.py", "threads_of_streams_may_allocate"),
    ),
    Mutant(
        "comm/transports/nccl/transport.py",
        "if self.broken is None and self.host.all_leave(within=_CLOSED_WITHIN):",
        "if self.broken is None:",
        ("test_closing.py", "a_rank_that_closes_alone"),
    ),
    # -- streams ---------------------------------------------------------------------------------------------------
    Mutant("device/cuda/stream.py", "self._issued.wait(timeout)", "pass", (DEVICE, "errors_reach_the_waiter")),
    Mutant(
        "device/cuda/stream.py",
        "self._issued.wait()",
        "pass",
        (DEVICE, "work_comes_after_tickets_that_the_host_has_not_come_to"),
    ),
    Mutant("device/cuda/stream.py", "stream.wait_event(self._cuda)", "pass", (DEVICE, "copies_go_all_four_ways")),
    Mutant(
        "device/cuda/stream.py",
        "self.cuda.wait_event(before)",
        "pass",
        (DEVICE, "a_copy_waits_for_what_the_caller_computed"),
    ),
    Mutant(
        "device/cuda/stream.py",
        "order(earlier, before=self.cuda)",
        "pass",
        (DEVICE, "work_can_come_after_tickets_alone"),
    ),
    Mutant("device/cuda/stream.py", "event._cuda.record(self.cuda)", "pass", (DEVICE, "the_gpu_can_time_out")),
    Mutant(
        "device/cuda/stream.py",
        "self._held.append((event._cuda, tuple(given)))",
        "pass",
        (DEVICE, "arrays_live_until_the_gpu_is_done"),
    ),
    Mutant(
        "device/cuda/stream.py",
        'return self.submit(lambda: order(ticket, before=self.cuda), name="wait", keep=(ticket,), after=())',
        'return self.submit(lambda: None, name="wait", keep=(ticket,), after=())',
        (DEVICE, "copies_go_all_four_ways"),
    ),
    Mutant(
        "device/cuda/stream.py",
        'self.submit(lambda: None, name="synchronize", eager=True, after=()).wait()',
        'self.submit(lambda: None, name="synchronize", eager=True, after=())',
        (DEVICE, "synchronize_waits_for_the_gpu"),
    ),
    Mutant(
        "device/cuda/stream.py",
        "return None if current.ptr == self.cuda.ptr else current.record(cupy.cuda.Event(disable_timing=True))",
        "return None",
        (DEVICE, "a_copy_waits_for_what_the_caller_computed"),
    ),
    Mutant("device/cuda/stream.py", "event.precede(before)", "pass", (DEVICE, "tickets_alone")),
    Mutant(
        "device/cuda/stream.py",
        "event.wait()",
        "pass",
        (DEVICE, "work_comes_after_tickets_that_the_host_has_not_come_to"),
    ),
    Mutant(
        "device/cuda/stream.py",
        "while self._held and (self.trouble() is None or time.monotonic() < until):",
        "while False:",
        (DEVICE, "a_stream_closes_behind_its_work"),
    ),
    # -- the device ------------------------------------------------------------------------------------------------
    Mutant(
        "device/cuda/device.py",
        "self.copy(source, out=out).wait()  # it may be pageable: then it is the caller's again only now",
        "self.copy(source, out=out)",
        (DEVICE, "what_is_put_is_there_for_what_comes_next"),
    ),
    Mutant(
        "device/cuda/device.py",
        "self.arrive(self.copy(source, out=out))",
        "self.copy(source, out=out)",
        (DEVICE, "what_is_put_is_there_for_what_comes_next"),
    ),
    Mutant(
        "device/cuda/device.py",
        "self.copy(self.flat(array), out=copy.reshape(-1)).wait()",
        "self.copy(self.flat(array), out=copy.reshape(-1))",
        (DEVICE, "what_is_fetched_is_what_was_computed"),
    ),
    Mutant(
        "device/cuda/device.py",
        "return order(ticket, before=cupy.cuda.get_current_stream(self.ordinal))",
        "return ticket.result",
        (DEVICE, "what_arrives_is_ordered_before_what_comes_next"),
    ),
    Mutant(
        "device/cuda/device.py",
        "current.wait_event(self._left)",
        "pass",
        ("test_dlpack.py", "blocks_on_different_streams_follow_each_other"),
    ),
    Mutant(
        "device/cuda/device.py",
        "self._left.record(current)",
        "pass",
        ("test_dlpack.py", "blocks_on_different_streams_follow_each_other"),
    ),
    Mutant(
        "device/cuda/device.py",
        'self.lane("compute").submit(lambda: None, name="synchronize", eager=True).wait()',
        "pass",
        ("ranks/test_order_on_gpus.py", "a_checkpoint_is_of_what_was_written"),
        ranks=2,
    ),
    Mutant(
        "device/cuda/device.py",
        "ticket: Ticket[Any] = on.submit(work, name=lane, keep=(source, out), eager=eager, after=after)",
        "ticket: Ticket[Any] = on.submit(work, name=lane, keep=(source, out), eager=eager, after=())",
        (DEVICE, "a_copy_waits_for_what_the_caller_computed"),
    ),
    # -- groups ----------------------------------------------------------------------------------------------------
    Mutant(
        "comm/transports/nccl/transport.py",
        "cupy.cuda.get_current_stream().synchronize()",
        "pass",
        (GROUPS, "spans_are_as_long_as_their_calls"),
        ranks=2,
    ),
    Mutant(
        "comm/transports/nccl/watch.py",
        "flight.event = cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))",
        "flight.event = cupy.cuda.Event(disable_timing=True)",
        (WATCH, "a_call_that_does_not_end_on_the_gpu"),
    ),
    Mutant(
        "comm/transports/nccl/watch.py",
        "if not self._gate.wait_for(lambda: not self._inside, _LEFT_WITHIN):",
        "if False:",
        (WATCH, "the_end_waits_until_nobody_is_inside"),
    ),
    Mutant(
        "comm/transports/nccl/watch.py",
        "while not self._stop.wait(_EVERY):",
        "while False:",
        (WATCH, "an_entry_that_does_not_return"),
    ),
)

NOT_OF_THE_GPU = {"device/cuda/stream.py": {"ticket.on(other)  the GPU waits, the host does not": "words"}}
"""Lines that look like synchronisations and are none."""
