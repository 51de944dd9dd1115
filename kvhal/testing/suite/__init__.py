"""The tests. `from kvhal.testing.suite import *` brings all of them into a test file of one's own."""

from __future__ import annotations

from kvhal.testing.suite import (
    test_addressing,
    test_attend,
    test_both_ways,
    test_contract,
    test_layout,
    test_lifecycle,
    test_numerics,
    test_presence,
    test_refusal,
)

_MODULES = (
    test_addressing,
    test_attend,
    test_both_ways,
    test_contract,
    test_layout,
    test_lifecycle,
    test_numerics,
    test_presence,
    test_refusal,
)
_TESTS = {name: item for module in _MODULES for name, item in vars(module).items() if name.startswith("test_")}
globals().update(_TESTS)
__all__ = list(_TESTS)  # as many as there are tests
