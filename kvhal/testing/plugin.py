"""The pytest plugin of the compliance suite: `-p kvhal.testing.plugin`, or `pytest_plugins` in a conftest.

It finds the platform, turns its table into cases, keeps what was measured and writes it as evidence. Its hooks touch
only the suite's own tests. How to run it: `kvhal.testing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import pytest

from kvhal import modes
from kvhal.errors import ConfigError, KvhalError
from kvhal.testing.cases import Case, Claim, Subject
from kvhal.testing.child import run_suite
from kvhal.testing.record import MEASURE, MODE, Recorder
from kvhal.testing.subject import Presence, find

__all__ = ["Attempt", "Measure", "Presence"]

_PRESENCE = pytest.StashKey[Presence]()
_SUITE = "kvhal.testing.suite"
_NOTHING = "kvhal_nothing"
_PRESENCE_TEST = "test_the_platform_is_present"
_ATTEMPT_S = 300
# claim, case: behaviour. accepted: what the table says of what it accepts. The others: what it does not.
_LISTS = ("claim", "case", "accepted", "refusal", "broken", "unclaimed")


class Measure(Protocol):
    """Keep a measured error as evidence and fail if it is above its bound (or no number)."""

    def __call__(self, check: str, error: float, bound: float) -> None: ...


class Attempt(Protocol):
    """Run the behaviour tests of a mode and encoding in a process of its own; whether all of them passed."""

    def __call__(self, mode: str, encoding: str) -> bool: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    # Here, not at import: the suite's modules import this one.
    pytest.register_assert_rewrite(_SUITE)
    group = parser.getgroup("kvhal", "kvhal compliance suite")
    group.addoption("--kvhal-platform", metavar="NAME", help="the platform to test; default: the detected one")
    group.addoption("--kvhal-device", metavar="N", type=int, default=0, help="its device (logical index)")
    group.addoption("--kvhal-mode", metavar="MODE", action="append", default=[], help="only this mode; repeatable")
    group.addoption("--kvhal-quick", action="store_true", help="fewer shapes")
    group.addoption("--kvhal-verify", action="store_true", help="also: what is broken or unclaimed must not work")
    group.addoption("--kvhal-require", metavar="NAME", help="fail, rather than skip, if this platform is not here")
    group.addoption("--kvhal-evidence", metavar="FILE", type=Path, help="write the results as evidence")
    # MODE:ENCODING, for --kvhal-verify's own children: run it although the table does not accept it.
    group.addoption("--kvhal-force", metavar="CELL", help="run one cell that the table does not accept")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{_NOTHING}: a case list of this platform is empty (kvhal)")
    option = config.option
    try:
        asked = tuple(dict.fromkeys(modes.mode(name).name for name in option.kvhal_mode))
        forced = _forced(option.kvhal_force)
    except ConfigError as exc:
        raise pytest.UsageError(str(exc)) from exc
    presence = find(option.kvhal_platform, option.kvhal_device, option.kvhal_require)
    if presence.subject is not None:
        subject = replace(presence.subject, modes=asked, is_quick=option.kvhal_quick, forced=forced)
        presence = replace(presence, subject=subject)
        if option.kvhal_evidence is not None:
            config.pluginmanager.register(Recorder(subject, option.kvhal_evidence), "kvhal-recorder")
    config.stash[_PRESENCE] = presence


def pytest_report_header(config: pytest.Config) -> str:
    return f"kvhal: {config.stash[_PRESENCE]}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not metafunc.module.__name__.startswith(_SUITE) and not metafunc.function.__module__.startswith(_SUITE):
        return
    subject, option = metafunc.config.stash[_PRESENCE].subject, metafunc.config.option
    if subject is None:
        # Only the test that says so will be kept.
        lists: dict[str, Sequence[Any]] = dict.fromkeys(_LISTS, ())
    else:
        lists = _lists(subject, verify=option.kvhal_verify)
    for name, values in lists.items():
        if name in metafunc.fixturenames:
            nothing = [pytest.param(None, id="none", marks=getattr(pytest.mark, _NOTHING))]
            named = [pytest.param(value, id=_id(value)) for value in values]
            metafunc.parametrize(name, named or nothing, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep of the suite what this platform has cases for; without a device only the test that says so."""
    presence = config.stash[_PRESENCE]
    kept = [item for item in items if not _is_ours(item) or _applies(item, presence)]
    dropped = [item for item in items if item not in set(kept)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    for item in items:
        mode = _mode_of(item)
        if mode is not None:
            item.user_properties.append((MODE, mode))


@pytest.fixture(scope="session")
def presence(pytestconfig: pytest.Config) -> Presence:
    """Whether the platform is here."""
    return pytestconfig.stash[_PRESENCE]


@pytest.fixture(scope="session")
def subject(presence: Presence) -> Subject:
    """The platform and device under test."""
    assert presence.subject is not None
    return presence.subject


@pytest.fixture
def measure(request: pytest.FixtureRequest) -> Measure:
    """Keeps measured errors with the test's report."""

    def keep(check: str, error: float, bound: float) -> None:
        request.node.user_properties.append((MEASURE, (check, error)))
        assert error <= bound, f"{check}: {error!r}, and at most {bound!r} is right"

    return keep


@pytest.fixture
def attempt(subject: Subject) -> Attempt:
    """Runs cells that the table does not accept."""

    def run(mode: str, encoding: str) -> bool:
        device = subject.hal.device
        done = run_suite(
            device.platform, device.index, ("--kvhal-quick", "-x", f"--kvhal-force={mode}:{encoding}"), _ATTEMPT_S
        )
        # A crash is a failure of the cell; any other code is one of the suite.
        assert done.code in (0, 1) or done.is_crash, f"the attempt itself failed:\n{done.output}"
        return done.code == 0

    return run


@pytest.fixture
def no_byte(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking memory fails the test."""

    def reserve(nbytes: int, _device: object) -> NoReturn:
        pytest.fail(f"{nbytes} bytes were reserved for what is refused")

    monkeypatch.setattr(subject.hal.platform, "reserve", reserve)


@pytest.fixture(autouse=True)
def _no_lease_is_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of the suite that leaves a live lease would hide a leak from the next."""
    yield
    if _is_ours(request.node):
        from kvhal.lease import live_leases

        left = [lease for lease in live_leases() if lease.is_open]
        for lease in left:
            lease.close()
        assert left == []


def _lists(subject: Subject, *, verify: bool) -> dict[str, Sequence[Any]]:
    try:
        refusals = subject.refusals()
        broken = [c for c in refusals if c.support.value == "broken"] if verify else []
        return {
            "claim": subject.claims(),
            "case": subject.cases(),
            "accepted": [] if subject.forced is not None else subject.claims(),
            "refusal": refusals,
            "broken": broken,
            "unclaimed": subject.unclaimed() if verify else [],
        }
    except KvhalError as exc:
        raise pytest.UsageError(str(exc)) from exc


def _id(value: Any) -> str:
    return value.id if isinstance(value, (Claim, Case)) else str(value.mode)


def _forced(asked: str | None) -> tuple[str, str] | None:
    if asked is None:
        return None
    mode, _, encoding = asked.partition(":")
    found = modes.mode(mode)
    return found.name, modes.encoding(found, encoding or None).name


def _is_ours(item: Any) -> bool:
    """Whether a test is the suite's, collected from the package or imported into a file of an adapter's own."""
    function = getattr(item, "function", None)
    return function is not None and str(function.__module__).startswith(_SUITE)


def _applies(item: Any, presence: Presence) -> bool:
    is_presence = item.function.__name__ == _PRESENCE_TEST
    if presence.subject is None or presence.unmet:
        return bool(is_presence)
    if item.get_closest_marker(_NOTHING) is not None:
        return False
    # A cell that is run by force is judged by its own tests alone.
    return presence.subject.forced is None or _mode_of(item) is not None


def _mode_of(item: Any) -> str | None:
    """The mode a behaviour test is about."""
    if not hasattr(item, "callspec"):
        return None
    for value in item.callspec.params.values():
        if isinstance(value, Case):
            return value.claim.cell.mode
        if isinstance(value, Claim) and "unclaimed" not in item.callspec.params:
            return value.cell.mode
    return None
