"""The table checked the other way round, with --kvhal-verify: what it says fails must fail.

Each attempt runs in a process of its own, since what is broken may take the process with it.
"""

from __future__ import annotations

from kvhal.capability.cells import Cell
from kvhal.testing.cases import Claim
from kvhal.testing.plugin import Attempt


def test_a_broken_cell_still_fails(broken: Cell, attempt: Attempt) -> None:
    worked = attempt(broken.mode, broken.encoding)
    assert not worked, f"{broken.mode} on {broken.arch} passes every test: delete the row {broken.rule}, it works"


def test_an_encoding_that_is_not_claimed_fails(unclaimed: Claim, attempt: Attempt) -> None:
    cell, encoding = unclaimed.cell, unclaimed.encoding
    worked = attempt(cell.mode, encoding)
    assert not worked, f"{cell.mode} works on {cell.arch} stored as {encoding}: add it to 'encodings' of {cell.rule}"
