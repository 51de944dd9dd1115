"""The budget is a sum with named terms, on readings of real machines (GiB, from public reports)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhal.budget import Budget, BudgetPolicy, BudgetReadings, blocks_that_fit, budget, check_blocks
from kvhal.errors import BudgetError, ConfigError
from kvhal.readings import Figure, Known, MemoryReading, Unknown

GIB = 1 << 30


def gib(value: float) -> int:
    return round(value * GIB)


def known(value: int) -> Known:
    return Known(value, "test")


NO = Unknown("not reported by this driver")


def reading(*, total: Figure = NO, free: Figure = NO, own: Figure = NO, peak: Figure = NO) -> MemoryReading:
    return MemoryReading(total, free, own, peak)


def readings(
    total: Figure,
    free_start: Figure,
    free_after: Figure,
    *,
    own: Figure = NO,
    own_start: Figure = NO,
    peak: Figure = NO,
    weights: int = 0,
    workspace: int = 0,
) -> BudgetReadings:
    return BudgetReadings(
        start=reading(total=total, free=free_start, own=own_start),
        after=reading(total=total, free=free_after, own=own),
        peak_bytes=peak,
        weights_bytes=weights,
        workspace_bytes=workspace,
    )


def term(found: Budget, name: str) -> int:
    return next(t.nbytes for b in found.bounds for t in b.terms if t.name == name)


def neighbour(own: Figure) -> BudgetReadings:
    """vLLM issue 55827: another engine takes 33 GiB while this one profiles."""
    return readings(
        known(gib(79.2)),
        known(gib(77.39)),
        known(gib(43.32)),
        own=own,
        own_start=known(0),
        peak=known(gib(0.34)),
        weights=gib(0.93),
    )


def test_growth_of_another_process_is_not_charged_to_the_share() -> None:
    found = budget(neighbour(known(gib(1.27))), BudgetPolicy(fraction=0.825))
    # The share is 79.2 x 0.825 = 65.34, less 1.27 of its own = 64.07; but only 43.32 are free.
    assert found.cache_bytes == gib(43.32)
    assert found.bound_by == "free"
    share = next(b for b in found.bounds if b.name == "share")
    assert share.nbytes == pytest.approx(64.07 * GIB, abs=3)
    assert term(found, "own use") == -gib(1.27)
    # 77.39 - 43.32 - 1.27 = 32.80 were taken by the other engine.
    assert any(f"{gib(77.39) - gib(43.32) - gib(1.27)} bytes" in note for note in found.notes)


def test_unknown_own_use_is_estimated_and_the_report_says_so() -> None:
    found = budget(neighbour(NO), BudgetPolicy(fraction=0.825, reserve_bytes=GIB))
    # min(65.34 - (0.93 + 0.34), 43.32 - 1)
    assert found.cache_bytes == gib(43.32) - GIB
    share = next(b for b in found.bounds if b.name == "share")
    assert share.nbytes == pytest.approx(64.07 * GIB, abs=3)
    assert any("estimate" in note and NO.reason in note for note in found.notes)


def test_own_use_above_the_share_is_an_error_that_lists_each_term() -> None:
    tight = readings(known(1000), known(900), known(800), own=known(600), peak=known(650), workspace=30)
    with pytest.raises(BudgetError) as caught:
        budget(tight, BudgetPolicy(fraction=0.6))
    # 600 - 600 - 50 - 30
    for text in (
        "-80 bytes",
        "+600 share of total",
        "-600 own use",
        "-50 transient peak",
        "-30 workspace",
        "+800 free",
    ):
        assert text in str(caught.value)


def test_the_terms_add_up_to_the_result() -> None:
    roomy = readings(known(1000), known(900), known(800), own=known(100), peak=known(150), workspace=30)
    by_share = budget(roomy, BudgetPolicy(fraction=0.5))
    assert (by_share.cache_bytes, by_share.bound_by) == (500 - 100 - 50 - 30, "share")
    by_free = budget(roomy, BudgetPolicy(fraction=1.0, reserve_bytes=7))
    assert (by_free.cache_bytes, by_free.bound_by) == (800 - 50 - 30 - 7, "free")
    for found in (by_share, by_free):
        assert sum(t.nbytes for t in found.terms) == found.cache_bytes


def test_free_memory_that_rose_is_a_note_and_the_smaller_reading_is_used() -> None:
    rose = readings(known(gib(94)), known(gib(82.94)), known(gib(90.17)), own=known(GIB), peak=known(GIB))
    found = budget(rose, BudgetPolicy(fraction=1.0))
    assert found.cache_bytes == gib(82.94)
    assert any(f"rose by {gib(90.17) - gib(82.94)} bytes" in note for note in found.notes)


def test_free_memory_that_did_not_change_is_fine() -> None:
    same = readings(known(gib(94)), known(gib(82.94)), known(gib(82.94)), own=known(GIB), peak=known(GIB))
    found = budget(same, BudgetPolicy(fraction=1.0))
    assert (found.cache_bytes, found.notes) == (gib(82.94), ())


@pytest.mark.parametrize(
    "total", [Unknown("reported as None"), Known(0, "cudaMemGetInfo"), Unknown("reported as 'N/A'")]
)
def test_an_unknown_total_needs_an_explicit_size(total: Figure) -> None:
    gb10 = readings(total, known(gib(82.94)), known(gib(90.17)), own=known(GIB), peak=known(GIB))
    with pytest.raises(BudgetError, match=r"total is unknown \(reported as .*bytes instead"):
        budget(gb10, BudgetPolicy())
    found = budget(gb10, BudgetPolicy(bytes=40 * GIB))
    assert (found.cache_bytes, found.bound_by, [b.name for b in found.bounds]) == (40 * GIB, "bytes", ["free"])
    with pytest.raises(BudgetError, match=f"largest that fits is {gib(82.94)} bytes"):
        budget(gb10, BudgetPolicy(bytes=83 * GIB))


def test_an_explicit_size_passes_the_same_check() -> None:
    small = readings(known(1000), known(900), known(800), own=known(100), peak=known(100))
    assert budget(small, BudgetPolicy(bytes=800)).cache_bytes == 800
    with pytest.raises(BudgetError) as caught:
        budget(small, BudgetPolicy(bytes=801))
    for text in ("801 bytes was asked for", "the largest that fits is 800 bytes", "-100 own use", "+800 free memory"):
        assert text in str(caught.value)


def test_an_explicit_size_with_nothing_known_is_taken_and_said_to_be_unchecked() -> None:
    found = budget(readings(NO, NO, NO), BudgetPolicy(bytes=5))
    assert found.cache_bytes == 5
    assert any("could not be checked" in note for note in found.notes)


def test_unknown_free_memory_leaves_the_share_and_a_note() -> None:
    blind = readings(known(1000), NO, NO, own=known(100), peak=known(100))
    found = budget(blind, BudgetPolicy(fraction=0.5))
    assert (found.cache_bytes, found.bound_by) == (400, "share")
    assert any("other processes" in note for note in found.notes)


def test_one_unknown_free_reading_leaves_the_other() -> None:
    half = readings(known(1000), NO, known(300), own=known(100), peak=known(100))
    found = budget(half, BudgetPolicy(fraction=0.9))
    assert (found.cache_bytes, found.bound_by) == (300, "free")


def test_an_unknown_peak_is_a_note_and_never_a_guess() -> None:
    found = budget(readings(known(1000), known(900), known(800), own=known(100)), BudgetPolicy(fraction=0.5))
    assert found.cache_bytes == 400
    assert any("peak of profiling is unknown" in note for note in found.notes)
    with pytest.raises(BudgetError, match="nothing is known of this process's use"):
        budget(readings(known(1000), known(900), known(800)), BudgetPolicy())


def test_a_policy_that_can_mean_nothing_is_refused() -> None:
    for fraction in (0.0, -0.5, 1.01, float("nan")):
        with pytest.raises(ConfigError, match="fraction"):
            BudgetPolicy(fraction=fraction)
    with pytest.raises(ConfigError, match="reserve_bytes is -1"):
        BudgetPolicy(reserve_bytes=-1)
    with pytest.raises(ConfigError, match="bytes is 0"):
        BudgetPolicy(bytes=0)
    with pytest.raises(ConfigError) as caught:
        readings(NO, NO, NO, weights=-1, workspace=-2)
    assert len(caught.value.problems) == 2


def test_blocks_that_fit_are_whole_and_at_least_one() -> None:
    assert blocks_that_fit(1000, 100, 300) == 3
    assert blocks_that_fit(1000, 101, 300) == 2
    with pytest.raises(BudgetError, match=r"1001 bytes .*1000 bytes are there"):
        blocks_that_fit(1000, 701, 300)
    with pytest.raises(ConfigError, match="block_bytes is 0"):
        blocks_that_fit(1000, 0, 0)


def test_more_blocks_than_memory_names_the_largest_number_that_fits() -> None:
    check_blocks(3, 1000, 100, 300)
    with pytest.raises(BudgetError) as caught:
        check_blocks(4, 1000, 100, 300)
    for text in ("4 blocks", "1300 bytes", "1000 bytes are there", "largest number that fits is 3"):
        assert text in str(caught.value)
    with pytest.raises(BudgetError, match="fits is 0"):
        check_blocks(1, 50, 100, 300)
    with pytest.raises(ConfigError):
        check_blocks(0, 1000, 100, 300)


sizes = st.integers(0, 1 << 40)
figures = st.one_of(sizes.map(known), st.just(NO))
any_readings = st.builds(
    readings,
    figures,
    figures,
    figures,
    own=figures,
    own_start=figures,
    peak=figures,
    weights=sizes,
    workspace=st.integers(0, 1 << 32),
)


def result(given_readings: BudgetReadings, policy: BudgetPolicy) -> int:
    """The cache's bytes, 0 for a refusal."""
    try:
        return budget(given_readings, policy).cache_bytes
    except BudgetError:
        return 0


@given(any_readings, st.floats(0.01, 1.0), st.integers(0, 1 << 34), st.none() | st.integers(1, 1 << 40))
def test_never_negative_never_above_what_is_free(
    given_readings: BudgetReadings, fraction: float, reserve: int, explicit: int | None
) -> None:
    got = result(given_readings, BudgetPolicy(fraction, reserve, explicit))
    assert got >= 0
    for free in (given_readings.start.free, given_readings.after.free):
        if isinstance(free, Known):
            assert got <= max(0, free.value - reserve)


@given(any_readings, st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_a_larger_fraction_never_gives_less(given_readings: BudgetReadings, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert result(given_readings, BudgetPolicy(low)) <= result(given_readings, BudgetPolicy(high))


@given(sizes.filter(bool), sizes, sizes, sizes, sizes)
def test_a_growing_neighbour_leaves_the_bound_by_share_as_it_was(
    total: int, own: int, peak: int, free: int, growth: int
) -> None:
    def shares(free_after: int) -> list[int]:
        given_readings = readings(
            known(total), known(free + 1), known(free_after), own=known(own), peak=known(own + peak)
        )
        try:
            found = budget(given_readings, BudgetPolicy(0.9))
        except BudgetError as exc:
            return [int(line.split()[1]) for line in str(exc).splitlines() if line.startswith("  share:")]
        return [b.nbytes for b in found.bounds if b.name == "share"]

    assert shares(free) == shares(max(0, free - growth))
    assert len(shares(free)) == 1
