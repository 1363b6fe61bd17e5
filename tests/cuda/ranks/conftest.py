"""Ranks with a GPU each under pytest; see `zerort.testing.pytest_ranks`."""

from zerort.testing.pytest_ranks import options, pytest_configure, pytest_runtest_makereport  # noqa: F401
