"""attend over staged contexts in the interpreter."""

from __future__ import annotations

from tests.kernels.staged import *  # noqa: F403  # the tests

DEVICE = "cpu"
