"""That there is something to test. The one test that may be skipped: a device that is absent is an answer."""

from __future__ import annotations

import pytest

from kvhal.testing.plugin import Presence


def test_the_platform_is_present(presence: Presence) -> None:
    if presence.error is not None:
        raise presence.error
    if presence.subject is None and not presence.is_required:
        pytest.skip(presence.absent)
    assert presence.subject is not None, f"--kvhal-require asks for it: {presence.absent}"
    assert presence.unmet == ""
