"""`Persistence`: the methods of a runtime that write its values to files, and read them back.

    save, load       a checkpoint, on any number of ranks and under any plan
    resume           the last completed step, which `last_step` keeps
    publish          weights for other processes, version by version

What they do is in `persist/` and in `publish/`. Every rank calls them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerort.engine.attachment import within
from zerort.engine.model.units import Units
from zerort.engine.properties import RuntimeProperties
from zerort.engine.report import Restored
from zerort.engine.stopping import unbroken

if TYPE_CHECKING:
    from zerort.publish import Feed

__all__ = ["Persistence"]


class Persistence(RuntimeProperties):
    """What a `Runtime` has to do with files."""

    units: Units
    _feeds: list[Feed]

    def save(self, path: str | Path, *, progress: Any = None, compress: str | None = None) -> Path:
        """Write a checkpoint: all or nothing; what was at ``path`` before stays until the new one is complete.

        Args:
            path: A directory that all ranks see.
            progress: What this rank needs to go on, as JSON can carry it: the position in the data, a generator's
                ``rng.bit_generator.state``. `load` gives it back.
            compress: ``"zstd"``: lossless, for slow storage; needs the zstandard package here and where it is loaded.

        Returns:
            The directory.
        """
        from zerort.engine.persist.saving import save  # here: checkpoints take their time to import

        self.context.check_whole("save")
        with unbroken("save", self.mesh.groups), within(self.attachments):
            return save(self.context, self.units, path, progress=progress, compress=compress)

    def load(self, path: str | Path, *, optimizer: bool = True, strict: bool = True) -> Restored:
        """Read a checkpoint, of any number of ranks and any plan, into the registered units.

        Args:
            path: What `save` was given.
            optimizer: Also read the optimizer's state, the count of updates and the loss scale.
            strict: Refuse a checkpoint that holds more tensors than are registered.

        Raises:
            CheckpointError: It is damaged, or of another model or optimizer; on every rank.
        """
        from zerort.engine.persist.saving import load

        self.context.check_open("load")
        with unbroken("load", self.mesh.groups), within(self.attachments):
            return load(self.context, self.units, path, optimizer=optimizer, strict=strict)

    def resume(self) -> Restored | None:
        """Go back to the last step that was kept (`last_step`), of this run or of the one before; None: there is none.

        Raises:
            CheckpointError: It is damaged, or of another model or optimizer; on every rank.
        """
        from zerort.engine.persist.last_step import resume

        self.context.check_open("resume")
        with unbroken("resume", self.mesh.groups), within(self.attachments):
            return resume(self.context, self.units)

    def publish(self, where: str | Path, *, dtype: str | None = "bfloat16", full_every: int = 50) -> Feed:
        """Open a feed: a directory from which `zerort.Reader`, in other processes, takes the weights.

        Every rank calls this, and ``feed.push()`` whenever readers are to have the parameters as they are then. A push
        writes the elements that changed since the last one, losslessly. Each rank compares its own shard with what it
        published last, which it keeps in a file of the directory: no second copy of the model in memory.

        Args:
            where: A directory that all ranks and readers see. It may hold earlier versions of the same model.
            dtype: What floats are published in, rounded to nearest; None: as they are gathered.
            full_every: How many versions lie between two whole ones, from which new readers begin.

        Raises:
            CheckpointError: It holds another model's versions, or somebody else publishes there; on every rank.
            StorageError: The file system refused; on every rank.
        """
        from zerort.engine.persist.saving import feed_of

        self.context.check_open("publish")
        with unbroken("publish", self.mesh.groups):
            feed = feed_of(self.context, self.units, where, dtype=dtype, full_every=full_every)
        self._feeds.append(feed)
        return feed
