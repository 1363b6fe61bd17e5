"""Waits and events of buffers and of the engine, as far as they matter to a GPU; see `mutants.py`."""

from mutant import Mutant

SEEDS, TIERS, WALK, ORDER = (
    f"ranks/test_{name}.py" for name in ("seeds", "tiers_on_gpus", "walk_on_gpus", "order_on_gpus")
)

ENGINE = (
    # -- buffers ---------------------------------------------------------------------------------------------------
    Mutant(
        "buffer/bucket.py",
        "summed: Array = self._device.arrive(self.reduction)",
        "summed: Array = self.reduction.result",
        (ORDER, "a_bucket_settles_what_it_has_just_fired"),
        ranks=2,
    ),
    Mutant(
        "buffer/bucket.py",
        "self._device.arrive(self._over_copies)",
        "pass",
        ("ranks/test_copies_on_gpus.py", "gradients_that_rest_partial"),
        ranks=2,
    ),
    Mutant(
        "buffer/bucket.py",
        '"""Forget all gradients."""\nif self._slot is not None:\nself._slot.release(after=self._read)',
        "self._slot.release()",
        (ORDER, "a_slot_is_read_also_if_its_sum_cannot_be_put_away"),
        ranks=2,
    ),
    Mutant(
        "buffer/bucket.py",
        "self._sum_over_copies()\nif self._slot is not None:\nself._slot.release(after=self._read)",
        "self._slot.release()",
        (SEEDS, "no_order_of_streams"),
        ranks=2,
    ),
    Mutant("buffer/flat.py", "self._whole.wait()", "pass", (ORDER, "values_are_assigned_behind_a_gather"), ranks=2),
    Mutant("buffer/slots.py", "self._owner.device.arrive(self.busy)", "pass", (SEEDS, "no_order_of_streams"), ranks=2),
    Mutant("buffer/slots.py", "slot.wait()", "pass", (SEEDS, "no_order_of_streams"), ranks=2),
    Mutant(
        "buffer/tree.py",
        "group.device.arrive(group.all_to_all(source, out=nodes, counts=counts, name=name))",
        "group.all_to_all(source, out=nodes, counts=counts, name=name)",
        (WALK, "the_fixed_tree"),
        ranks=2,
    ),
    # -- parameters ------------------------------------------------------------------------------------------------
    Mutant(
        "engine/residence/host_parameters.py",
        'self.written.on(self._group.device.lane("copy in"))',
        "pass",
        (TIERS, "an_update_is_the_same_on_either_side"),
        ranks=2,
    ),
    Mutant(
        "engine/residence/host_parameters.py",
        "self._group.after(here)",
        "pass",
        (SEEDS, "no_order_of_streams"),
        ranks=2,
    ),
    Mutant(
        "engine/model/unit.py",
        "views = self._context.device.arrive(ticket)",
        "views = ticket.result",
        (SEEDS, "no_order_of_streams"),
        ranks=2,
    ),
    Mutant("engine/model/gather.py", "self.fetched.wait()", "pass", (SEEDS, "no_order_of_streams"), ranks=2),
    Mutant(
        "engine/model/gather.py",
        "self._context.device.arrive(fetched)  # if it was gathered ahead and not used: it is read until then",
        "pass",
        (ORDER, "a_gather_that_nobody_used_leaves_its_slot"),
        ranks=2,
    ),
    # -- gradients -------------------------------------------------------------------------------------------------
    Mutant(
        "engine/residence/gradients.py",
        "gradient = reduction.wait()",
        "gradient = reduction.result",
        (SEEDS, "no_order_of_streams"),
        ranks=2,
    ),
    Mutant(
        "engine/residence/gradients.py",
        "self.column.write(0, gradient).wait()",
        "self.column.write(0, gradient)",
        (SEEDS, "no_order_of_streams"),
        ranks=2,
    ),
    Mutant(
        "engine/residence/gradients.py",
        "slot.release(after=ticket)",
        "slot.release()",
        (SEEDS, "no_order_of_streams"),
        ranks=2,
    ),
    # -- the step --------------------------------------------------------------------------------------------------
    Mutant(
        "engine/step/digest.py", "context.stage.finish()", "pass", (ORDER, "a_digest_is_of_what_was_written"), ranks=2
    ),
    Mutant(
        "engine/step/digest.py",
        "section.parameters.wait()  # a gather in place may write to this rank's range, too: the same values",
        "pass",
        (ORDER, "a_digest_is_of_what_was_written"),
        ranks=2,
    ),
    Mutant(
        "engine/residence/stage.py",
        "self._staging.finish()",
        "pass",
        (ORDER, "a_digest_is_of_what_was_written"),
        ranks=2,
    ),
    Mutant(
        "engine/model/gather.py",
        "context.stage.finish()",
        "pass",
        (ORDER, "a_checkpoint_is_of_what_was_written"),
        ranks=2,
    ),
    Mutant(
        "engine/model/gather.py",
        "section.parameters.wait()",
        "pass",
        (ORDER, "values_are_assigned_behind_a_gather"),
        ranks=2,
    ),
    Mutant(
        "engine/step/update.py",
        "section.parameters.written = joined([back for _, back in pairs], result=None)",
        "pass",
        (TIERS, "an_update_is_the_same_on_either_side"),
        ranks=2,
    ),
    Mutant(
        "engine/step/update.py",
        "return context.stage.run([chunk.hops(brought)], lambda _, *columns: chunk.update(settings, columns))",
        "context.stage.run([chunk.hops(brought)], lambda _, *columns: chunk.update(settings, columns))",
        (ORDER, "what_comes_back_late_is_what_a_disk_gets"),
        ranks=2,
    ),
    Mutant(
        "engine/persist/saving.py",
        "context.device.synchronize()",
        "pass",
        (ORDER, "a_checkpoint_is_of_what_was_written"),
        ranks=2,
    ),
    Mutant(
        "engine/persist/snapshot.py",
        'shard.all_gather(mine, out=whole, counts=partition.counts, name="load").wait()',
        'shard.all_gather(mine, out=whole, counts=partition.counts, name="load")',
        (ORDER, "a_checkpoint_is_of_what_was_written"),
        ranks=2,
    ),
)

_OF_THE_HOST = "between arrays of the host"
_OF_A_DISK = "between the host and a disk"

NOT_OF_THE_GPU = {
    "buffer/bucket.py": {
        "ticket.wait()": "for its error; `finish_reduce` orders what is computed",
        "array, out=array, name=self.name, eager=False, after=self.reduction": "calls over GPUs take turns",
    },
    "engine/step/copies.py": {
        'everyone = context.world.all_gather(mine, name="reduced").wait().reshape(context.world.size, len(units))': (
            _OF_THE_HOST
        ),
        "bucket.wait()": "the end of calls that failed",
    },
    "buffer/slots.py": {
        "slot.busy.wait()  # not only for what comes next: the memory goes": "a stream holds the arrays of its work",
    },
    "engine/model/assignment.py": {
        'context.world.barrier(name="assign").wait()  # nobody reads what is about to change': (
            "ranks that share memory"
        ),
    },
    "engine/residence/chunked_array.py": {
        "return self.read(self.cuts[at], np.empty(self._numel(at), self.dtype)).wait()": _OF_A_DISK,
    },
    "engine/residence/column_parameters.py": {
        "self.column.write(begin - self._own.first, source).wait()": _OF_THE_HOST
    },
    "engine/model/gather.py": {
        "self._context.mesh.shard.barrier(name=f\"slot for {self._name or 'root unit'}\"[:60]).wait()": "shared slots",
    },
    "engine/residence/host_parameters.py": {
        "self._whole.wait()": "whoever lets a slot go has waited",
    },
    "engine/residence/resting_parameters.py": {
        "self._spread.wait()": "whoever lets a slot go has waited",
    },
    "engine/residence/host_memory.py": {
        'self._group.device.lane(name).submit(lambda: None, name="close").wait(_LAST_COPY)': (
            "the emulated device keeps memory that copies use; CUDA does not promise that"
        ),
    },
    "engine/step/update.py": {
        'return context.mesh.shard.all_reduce(values, name="statistics").wait()': _OF_THE_HOST,
    },
    "engine/persist/snapshot.py": {
        "section.parameters.restore().wait()": "for its error; whoever looks at them waits for the same Ticket",
    },
    "engine/step/state.py": {
        "self.master.write(first, master).wait()": _OF_A_DISK,
        "param.write(first, rounded).wait()": _OF_A_DISK,
    },
    "engine/step/record.py": {
        "everyone = group.all_gather(flat, name=name).wait().reshape(group.size, -1)": _OF_THE_HOST,
    },
    "engine/step/measure.py": {
        "flat = context.mesh.shard.all_gather(np.concatenate(sums), counts=[sum(row) for row in counts], "
        'name="norm").wait()': _OF_THE_HOST,
    },
    "engine/step/refresh.py": {
        'context.mesh.shard.barrier(name="refresh").wait()  # one for all units: their gathers need none any more': (
            "ranks that share memory"
        ),
    },
    "engine/residence/tiers.py": {"self._pipeline.finish()": _OF_A_DISK},
    "engine/model/values.py": {
        'context.world.broadcast(whole.reshape(-1), name="initial values").wait()': _OF_THE_HOST,
    },
    "engine/model/units.py": {
        "section.bucket.wait()": "for its error; `finish_reduce` orders what is computed",
    },
}
"""Lines that look like synchronisations, and why they are none of a GPU's."""
