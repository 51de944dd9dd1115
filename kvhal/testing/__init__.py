"""The compliance suite: what holds for every platform, shipped so that anybody can prove theirs.

From a shell, for an adapter that is installed::

    pytest -p kvhal.testing.plugin --pyargs kvhal.testing.suite --kvhal-platform NAME

or in an adapter's own tests: `pytest_plugins = ["kvhal.testing.plugin"]` in conftest.py, and in one test file
`from kvhal.testing.suite import *`. `kvhal verify` runs the same and keeps the result as evidence.

Tests name capabilities, never platforms, and no cell is skipped: one that is accepted runs the behaviour tests, one
that is not must refuse with its reason before a byte is taken. With `--kvhal-verify` the table is checked the other way
round as well: a broken cell that works, and an encoding that works and is not claimed, fail the run.
"""
