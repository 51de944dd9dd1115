"""Inline assembly makes several elements at a time, and which these are is the compiler's choice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvhal.kernels.triton as room


def calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(Path(room.__path__[0]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("inline_asm_elementwise"):
                yield f"{path.stem}:{node.lineno}", node


CALLS = dict(calls())
WRITTEN = [place for place, call in CALLS.items() if ast.literal_eval(call.args[0])]


def test_there_is_some() -> None:
    assert len(CALLS) >= 5


def test_an_empty_instruction_returns_the_register_it_was_given() -> None:
    empty = [ast.literal_eval(call.args[1]) for place, call in CALLS.items() if place not in WRITTEN]
    assert empty == ["=v,0"]


@pytest.mark.parametrize("place", WRITTEN)
def test_every_element_of_every_operand_is_read(place: str) -> None:
    """An operand read for one element only would be that of another row wherever elements side by side are of several:
    the codes of rows that are not finite were once masked so, and rows beside them lost theirs."""
    text, constraints = (ast.literal_eval(argument) for argument in CALLS[place].args[:2])
    operands = [part.strip() for part in constraints.split(",")]
    assert {int(n) for n in re.findall(r"\$(\d+)", text)} == set(range(len(operands)))


@pytest.mark.parametrize("place", WRITTEN)
def test_results_written_before_operands_are_read_have_registers_of_their_own(place: str) -> None:
    text, constraints = (ast.literal_eval(argument) for argument in CALLS[place].args[:2])
    outputs = [part.strip() for part in constraints.split(",") if part.strip().startswith("=")]
    lines = [line.strip() for line in re.split(r"[;\n]", text) if "$" in line]
    for number, output in enumerate(outputs):
        written = next(i for i, line in enumerate(lines) if re.search(rf"^\S+ \${number}\b", line))
        later = {int(n) for line in lines[written + 1 :] for n in re.findall(r"\$(\d+)", line.split(",", 1)[-1])}
        reads_operands = any(n >= len(outputs) for n in later)
        assert output.startswith("=&") or not (reads_operands or later - {number})
