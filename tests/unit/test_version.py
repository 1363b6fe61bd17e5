"""The version stands in two places, which must agree."""

import importlib.metadata

import zerort


def test_the_package_and_its_metadata_have_one_version():
    assert zerort.__version__ == importlib.metadata.version("zerort")
