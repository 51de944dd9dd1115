"""YAML text -> values and positions: what is read, what is refused, and where the caret stands."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhal.errors import ConfigError, Problem
from kvhal.source import yaml_source
from kvhal.source.textfile import MAX_BYTES
from kvhal.source.yaml_source import parse, parse_value, read


@pytest.fixture(params=["libyaml", "python"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both YAML loaders must answer the same; libyaml is not in every PyYAML build."""
    monkeypatch.setattr(yaml_source, "_LOADER", yaml.CSafeLoader if request.param == "libyaml" else yaml.SafeLoader)


def refused(text: str) -> tuple[Problem, ...]:
    """The problems of `text`, whether they stopped the parse or not."""
    try:
        return parse(text, "f.yaml").problems
    except ConfigError as exc:
        return exc.problems


def only(text: str) -> Problem:
    (problem,) = refused(text)
    return problem


@pytest.mark.parametrize("word", ["false", "off", "no", "False", "OFF", "No"])
def test_false_means_false(word: str) -> None:
    value = parse(f"prefix_zeroing: {word}\n", "f.yaml").value
    assert value == {"prefix_zeroing": False}
    assert isinstance(value, dict)
    assert value["prefix_zeroing"] is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"false"', "false"),
        ("0", 0),
        ("1e3", "1e3"),
        ("1.0e+3", 1000.0),
        ("null", None),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("0x10", 16),
        ("1_000", 1000),
        ("[1, [a, {b: c}]]", [1, ["a", {"b": "c"}]]),
        ("'&a *b <<'", "&a *b <<"),
    ],
)
def test_plain_values(loader: None, text: str, expected: object) -> None:
    source = parse(f"a: {text}\n", "f.yaml")
    assert source.value == {"a": expected}
    assert source.problems == ()


def test_positions_of_keys_and_values(loader: None) -> None:
    source = parse("kvhal: 1\ncache:\n  mode: é日 FP8\nlist:\n- a\n- {b: 2}\n", "dir/f.yaml")
    assert source.where(("cache", "mode")) == "dir/f.yaml:3:9"
    assert source.where(("cache", "mode"), at_key=True) == "dir/f.yaml:3:3"
    assert source.where(("list", 1, "b")) == "dir/f.yaml:6:7"
    assert source.where(("cache", "absent")) == "dir/f.yaml:2:1", "the key of the nearest parent"
    assert source.where(("absent",)) == "dir/f.yaml:1:1"
    assert source.line(("cache", "mode")) == "dir/f.yaml:3"


def test_caret_stands_under_the_value() -> None:
    source = parse("cache:\n  mode: FP8\n", "f.yaml")
    assert source.excerpt(("cache", "mode")) == "    2 |   mode: FP8\n      |         ^"


def test_caret_is_aligned_behind_wide_characters_and_tabs() -> None:
    source = parse('{"日本": 1, "b":\t2}\n', "f.yaml")
    line, caret = source.excerpt(("b",)).split("\n")
    cells = sum(2 if c in "日本" else 1 for c in line[: line.index("2}")])
    assert caret.index("^") == cells


def test_excerpt_of_an_endless_line_is_clipped() -> None:
    source = parse(f"a: [{'1, ' * 50_000}2]\nb: {{c: {'x' * 5000}}}\n", "f.yaml")
    assert len(source.excerpt(("a", 40_000))) < 300
    assert len(source.excerpt(("b", "c"))) < 300


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("a: 1\nb: *x\n", "f.yaml:2:4", "the alias *x is not allowed"),
        ("a: &x 1\n", "f.yaml:1:4", "the anchor &x is not allowed"),
        ("a: &x\n  b: 1\n", "f.yaml:1:4", "the anchor &x is not allowed"),
        ("a:\n  <<: {b: 1}\n", "f.yaml:2:3", "the merge key << is not allowed"),
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3:1", "the key 'a' stands here a second time; first on line 1"),
        ("a: {26: 1, '26': 2}\n", "f.yaml:1:12", "the key '26' stands here a second time; first on line 1"),
        ("on: 1\n", "f.yaml:1:1", "the key 'on' is not text"),
        ("null: 1\n", "f.yaml:1:1", "the key 'null' is not text"),
        ("1.5: 1\n", "f.yaml:1:1", "the key '1.5' is not text"),
        ("[a]: 1\n", "f.yaml:1:1", "a key must be text"),
        ("{a: b}: 1\n", "f.yaml:1:1", "a key must be text"),
        ("a: !!str 1\n", "f.yaml:1:4", "the tag 'tag:yaml.org,2002:str' is not allowed"),
        ("a: !!python/object:os.system x\n", "f.yaml:1:4", "the tag 'tag:yaml.org,2002:python/object:os.system'"),
        ("a: 1:30\n", "f.yaml:1:4", "YAML reads 1:30 as a base-60 number"),
        ("a: 010\n", "f.yaml:1:4", "YAML reads 010 as an octal number"),
        ("a: 0x_\n", "f.yaml:1:4", "'0x_' is not a number"),
        (f"a: {'9' * 5000}\n", "f.yaml:1:4", "a number of 5000 characters"),
        ("a: [1\nb: 2\n", "f.yaml:2:", "this is not valid YAML"),
        ("a: 1\n--- \nb: 2\n", "f.yaml:2:1", "a second document starts here"),
        ("- a\n", "f.yaml:1:1", "the top of the file is a list; it must be a mapping"),
        ("hello\n", "f.yaml:1:1", "the top of the file is the single value 'hello'"),
        ("a: \x07\n", "f.yaml:1:4", "the character U+0007 may not stand in YAML"),
        ("\n\n# only a comment\n", "f.yaml", "the file is empty"),
        ("", "f.yaml", "the file is empty"),
    ],
)
def test_refused_with_its_place(loader: None, text: str, where: str, message: str) -> None:
    problem = only(text)
    assert problem.message.startswith(message)
    assert problem.where.startswith(where)
    if where != "f.yaml":
        assert problem.excerpt.endswith("^")


def test_problems_of_one_file_come_together(loader: None) -> None:
    problems = refused("a: &x 1\nb: *x\na: 2\nc: !!int 3\n")
    assert [p.where for p in problems] == ["f.yaml:1:4", "f.yaml:2:4", "f.yaml:3:1", "f.yaml:4:4"]


def test_whole_number_keys_are_layer_numbers() -> None:
    assert parse("shares: {26: 24, '27': 25}\n", "f.yaml").value == {"shares": {"26": 24, "27": 25}}


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting_is_refused_before_any_recursion(loader: None, opening: str) -> None:
    assert parse("a: " + "[" * 31 + "]" * 31, "f.yaml").problems == ()
    problem = only("a: \n " + opening * 20_000)
    assert problem.message == "values are nested deeper than 32 levels"


def test_depth_limit_is_exact() -> None:
    assert parse("a: " + "[" * 32 + "]" * 32, "f.yaml").problems == ()
    assert only("a: " + "[" * 32 + "1" + "]" * 32).message == "values are nested deeper than 32 levels"


def test_huge_file_is_refused_from_its_size(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(50 << 20)
    start = time.process_time()
    with pytest.raises(ConfigError, match=f"the file has {50 << 20} bytes; at most {MAX_BYTES} are read"):
        read(path)
    assert time.process_time() - start < 0.1


@pytest.mark.parametrize(
    ("raw", "where", "message"),
    [
        (b"a: 1\x00\n", "", "the file is binary: byte 4 is NUL"),
        (b"a: 1\nb: \xff\n", ":2:4", "the file is not UTF-8: byte 0xff"),
        ("a: 1".encode("utf-16"), "", "the file is binary"),
        (b"", "", "the file is empty"),
    ],
)
def test_bytes_that_are_not_text(tmp_path: Path, raw: bytes, where: str, message: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        read(path)
    (problem,) = caught.value.problems
    assert problem.where == f"{path}{where}"
    assert problem.message.startswith(message)


def test_byte_order_mark_moves_no_column(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfkvhal: 1\r\na: x\r\n")
    source = read(path, "f.yaml")
    assert source.value == {"kvhal": 1, "a": "x"}
    assert source.where(("a",)) == "f.yaml:2:4"
    assert source.excerpt(("kvhal",)).split("\n")[0] == "    1 | kvhal: 1"


def test_names_that_are_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, message in (
        ("absent.yaml", "the file does not exist"),
        ("nowhere/absent.yaml", "the file does not exist"),
        (".", "found a directory"),
        ("fifo", "found not a regular file"),
        ("nul\0l", "the file cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16", 16),
        ("off", False),
        ("null", None),
        ("[a, 1]", ["a", 1]),
        ("{k: a, v: b}", {"k": "a", "v": "b"}),
        ("'1'", "1"),
    ],
)
def test_values_of_options(text: str, expected: object) -> None:
    assert parse_value(text, "--set a.b") == expected


@pytest.mark.parametrize("text", ["", "  ", "*x", "&x 1", "[1", "{a: 1, a: 2}", "\x1b"])
def test_bad_values_of_options_name_the_option(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_value(text, "--set a.b")
    assert {p.where for p in caught.value.problems} == {"--set a.b"}


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("ab:-{}[]&*!|>'\"#,? \n\t0_x1.<%@`é日\u2028")))
def test_any_text_is_read_or_refused(text: str) -> None:
    """And what is read is what PyYAML reads, where PyYAML accepts it and nothing was refused."""
    try:
        source = parse(text, "f.yaml")
    except ConfigError as exc:
        assert exc.problems  # either outcome is right
        return
    if not source.problems:
        loaded = yaml.load(text, yaml.CBaseLoader if yaml.__with_libyaml__ else yaml.BaseLoader)
        assert list(map(str, loaded)) == list(source.value)  # type: ignore[call-overload] # it is a mapping
