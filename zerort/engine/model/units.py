"""`Units`: all units of a runtime, by name, and what is asked of all of them at once."""

from __future__ import annotations

from collections.abc import Iterator

from zerort.engine.model.section import Section
from zerort.engine.model.unit import Unit
from zerort.engine.step.state import OptimizerState

__all__ = ["Units"]


class Units(dict[str, Unit]):
    """Units by name, in the order of registration."""

    def sections(self) -> Iterator[Section]:
        """Yield every section, in order."""
        for unit in self.values():
            yield from unit.sections

    def trained_sections(self) -> Iterator[Section]:
        """Yield every section that has optimizer state, in order."""
        for section in self.sections():
            if section.state is not None:
                yield section

    def states(self) -> Iterator[OptimizerState]:
        """Yield the optimizer's state of every section that has some, in order."""
        for section in self.sections():
            if section.state is not None:
                yield section.state

    def wait_for_reductions(self) -> None:
        """Wait for every reduction that was fired, and raise what went wrong in one."""
        for section in self.trained_sections():
            for bucket in section.buckets:
                bucket.wait()  # not-gpu: for its error; `finish_reduce` orders what is computed

    def end_residuals(self, *, updated: bool, scale: float) -> None:
        """Keep what coding has lost in this step, or what it had before if the step was skipped.

        Args:
            updated: Whether the step has updated parameters.
            scale: What the loss scale was multiplied by after the step.
        """
        for section in self.sections():
            if section.residual is not None:
                section.residual.keep() if updated else section.residual.restore()
                section.residual.scale(scale)

    def forget_gradients(self) -> None:
        """Start a new step's gradients."""
        for unit in self.values():
            unit.forget_gradients()

    def close(self) -> None:
        """Give back what all of them hold."""
        for unit in self.values():
            unit.close()
