"""For a child process with TRITON_INTERPRET=1: the kernels' own source, run by the interpreter on CPU tensors."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

assert os.environ.get("TRITON_INTERPRET") == "1", "run through tests/triton/test_interpreter.py"


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """NaN, infinity and overflow are what these tests are about; numpy, which interprets, would warn of each."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
        yield
