"""What every test shares: the CPU as a detected device, and small specs."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator

import pytest
import torch

import kvhal
from kvhal.hal import Hal


@pytest.fixture(scope="session")
def hal() -> Hal:
    """The CPU platform, whatever torch build runs the tests."""
    return kvhal.get("cpu")


@pytest.fixture(autouse=True, scope="session")
def no_evidence_of_the_developers() -> Iterator[None]:
    """What somebody has proved on this machine must not decide a test."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("XDG_CONFIG_HOME", folder)
        yield


@pytest.fixture(autouse=True)
def data_of_its_own(request: pytest.FixtureRequest) -> None:
    """Random tensors depend on a test's name alone, so one that failed anywhere fails again by itself."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True)
def no_lease_is_left_open() -> Iterator[None]:
    """A test that leaves a live lease would hide a leak from the next."""
    yield
    from kvhal.lease import live_leases

    assert [lease for lease in live_leases() if lease.is_open] == []
