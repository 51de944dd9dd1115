"""Comparing two results: losses, noise, what vanished, and what cannot be compared; exit codes of the command."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.cli import main
from bench.compare import Verdict, changes, noise_of
from bench.results import Case, Failure, Result

WHERE: dict[str, str | int] = {"machine": "a GPU", "arch": "sm_90", "torch": "2.11.0"}


def result(*cases: Case, **given: object) -> Result:
    return replace(Result("decode", WHERE, cases=cases), **given)  # type: ignore[arg-type]  # fields of Result


def case(us: float, spread: float = 0.0, name: str = "a", **given: object) -> Case:
    return replace(Case(name, us, spread), **given)  # type: ignore[arg-type]  # fields of Case


def run(tmp_path: Path, old: Result, new: Result, *args: str) -> int:
    old.save(tmp_path / "old.json")
    new.save(tmp_path / "new.json")
    return main(["compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *args])


@pytest.mark.parametrize(
    ("old", "new", "args", "code", "told"),
    [
        (case(100.0), case(102.9), (), 0, "0 changed, 0 lost"),
        (case(100.0), case(103.1), (), 1, "1 changed, 1 lost"),
        (case(100.0), case(103.1), ("--noise", "0.05"), 0, "0 changed, 0 lost"),
        (case(100.0), case(101.0), ("--noise", "0.005"), 1, "1 changed, 1 lost"),
        (case(100.0), case(90.0), (), 0, "1 changed, 0 lost"),
        # Spreads of 8 and 12 us: boxes of half that on either side touch up to 110 us.
        (case(100.0, 8.0), case(109.9, 12.0), (), 0, "0 changed, 0 lost"),
        (case(100.0, 8.0), case(110.1, 12.0), (), 1, "1 changed, 1 lost"),
        (case(100.0), case(100.0, name="b"), (), 1, "2 changed, 1 lost"),
        (case(100.0, error=1e-3), case(90.0, error=4e-3), (), 1, "1 changed, 1 lost"),
        (case(100.0, exact=True), case(100.0, exact=False), (), 1, "1 changed, 1 lost"),
    ],
)
def test_exit_codes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    old: Case,
    new: Case,
    args: tuple[str, ...],
    code: int,
    told: str,
) -> None:
    assert run(tmp_path, result(old), result(new), *args) == code
    assert told in capsys.readouterr().out


def test_the_changed_cases_are_printed_and_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = result(case(100.0, name="alpha"), case(50.0, name="beta"), case(10.0, name="gone"))
    new = result(case(120.0, name="alpha"), case(50.0, name="beta"), case(5.0, name="added"))
    assert run(tmp_path, old, new) == 1
    out = capsys.readouterr().out
    assert "beta" not in out
    lines = {name: next(line for line in out.splitlines() if name in line) for name in ("alpha", "gone", "added")}
    assert "+20.0%" in lines["alpha"]
    assert "slower" in lines["alpha"]
    assert "vanished" in lines["gone"]
    assert "new" in lines["added"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"where": WHERE | {"machine": "another"}}, "another"),
        ({"where": WHERE | {"arch": "sm_100"}}, "sm_100"),
        ({"benchmark": "store"}, "store"),
    ],
)
def test_what_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], named: str
) -> None:
    assert run(tmp_path, result(case(1.0)), result(case(1.0), **change)) == 2
    assert named in capsys.readouterr().err


def test_another_schema_cannot_be_compared(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    result(case(1.0)).save(old)
    new = tmp_path / "new.json"
    new.write_text(old.read_text().replace('"version": 1', '"version": 2'))
    assert main(["compare", str(old), str(new)]) == 2
    assert main(["compare", str(old), str(tmp_path / "missing.json")]) == 2


def test_other_versions_can_be_compared(tmp_path: Path) -> None:
    assert run(tmp_path, result(case(1.0)), result(case(1.0), where=WHERE | {"torch": "2.12.0"})) == 0


def test_a_case_that_failed_vanished_with_its_reason() -> None:
    (found,) = changes(result(case(1.0)), result(failures=(Failure("a", "OutOfMemoryError: no"),)), 0.03)
    assert found.verdict is Verdict.VANISHED
    assert found.reason == "OutOfMemoryError: no"


def test_a_new_case_that_is_wrong_is_a_loss() -> None:
    (found,) = changes(result(), result(case(1.0, exact=False)), 0.03)
    assert found.verdict is Verdict.WRONG
    assert found.verdict.is_loss


def test_the_noise_is_the_larger_of_both() -> None:
    assert noise_of(case(200.0, 1.0), case(200.0, 1.0), 0.03) == 0.03
    assert noise_of(case(200.0, 10.0), case(300.0, 30.0), 0.03) == pytest.approx(0.1)
