"""A capability table is total and exact: every question has one answer, and a file that lacks one does not load."""

from __future__ import annotations

from pathlib import Path as FilePath

import pytest

from kvhal.capability.table import OPERATIONS, CapabilityTable, Limits, Path, Shapes, Support, arch_token
from kvhal.errors import ConfigError, UnsupportedMode
from kvhal.modes import MODES
from kvhal.spec import CacheSpec

CPU = FilePath(__file__).parent.parent / "platforms" / "kvhal_cpu" / "capabilities.yaml"

# Line 1 is `platform`; rows of modes stand at lines 4 to 8, of operations at 10 and 11.
FAKE = """\
platform: fake
archs: [sm_80, gfx942, gfx1100]
modes:
  - {archs: all, modes: [bfloat16, float16], support: run, path: native}
  - {archs: [gfx942], modes: [fp8_e4m3, fp8_per_token_head], support: run, path: native, encoding: e4m3fnuz, encodings: [e4m3fn, e4m3fnuz]}
  - {archs: [sm_80, gfx1100], modes: [fp8_e4m3, fp8_per_token_head], support: refused, reason: no fp8 conversion, instead: [int8_per_token_head], links: [issue 12]}
  - {archs: all, modes: [fp8_e5m2], support: broken, path: emulated, reason: no kernel yet, evidence: run of 2026-11-30}
  - {archs: all, modes: [int8_per_token_head, int4_per_token_head], support: experimental, path: emulated_slow, reason: not measured, head_dim: {min: 16, max: 256, multiple_of: 16}, block_size: {multiple_of: 16}}
operations:
  - {archs: all, operations: [release_visibly, alibi, tree_mask, cross_attention, attend_opaque], support: refused, reason: not here}
  - {archs: all, operations: [graph_memory_profiling, expandable_segments, virtual_memory_remap, peer_copy], support: run}
"""  # noqa: E501 - one row a line, so that a rule's line can be counted


def table(text: str = FAKE) -> CapabilityTable:
    return CapabilityTable.from_text(text, "fake.yaml")


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        table(text)
    return [str(p) for p in caught.value.problems]


def spec(head_dim: int = 128, block_size: int = 16) -> CacheSpec:
    return CacheSpec.uniform(
        mode="int8_per_token_head", num_layers=1, num_kv_heads=1, head_dim=head_dim, block_size=block_size
    )


def test_every_mode_and_operation_has_one_answer_on_every_arch() -> None:
    found = table()
    assert set(found.cells) == {(mode, arch) for mode in MODES for arch in ("sm_80", "gfx942", "gfx1100")}
    assert set(found.operations) == {(name, arch) for name in OPERATIONS for arch in ("sm_80", "gfx942", "gfx1100")}


def test_a_cell_says_what_its_row_says_and_where() -> None:
    refused = table().cell("fp8", "sm_80")
    assert (refused.mode, refused.arch, refused.support, refused.path) == ("fp8_e4m3", "sm_80", Support.REFUSED, None)
    assert (refused.reason, refused.instead) == ("no fp8 conversion", ("int8_per_token_head",))
    assert (refused.links, refused.rule) == (("issue 12",), "fake.yaml:6")
    broken = table().cell("fp8_e5m2", "gfx942")
    assert (broken.support, broken.path, broken.evidence) == (Support.BROKEN, Path.EMULATED, "run of 2026-11-30")
    operation = table().operation("alibi", "gfx942")
    assert (operation.support, operation.reason, operation.rule) == (Support.REFUSED, "not here", "fake.yaml:10")


def test_the_default_encoding_is_first_and_the_others_are_accepted() -> None:
    assert table().cell("fp8_per_token_head", "gfx942").encodings == ("e4m3fnuz", "e4m3fn")
    assert table().cell("fp8_per_token_head", "gfx942").encoding == "e4m3fnuz"
    assert table().cell("int4_per_token_head", "sm_80").encodings == ("int4",)
    assert table().cell("fp8_e4m3", "sm_80").encodings == ("e4m3fn",)


def test_only_the_encodings_that_a_row_calls_native_are() -> None:
    split = table(FAKE.replace("e4m3fnuz]}", "e4m3fnuz], native: [e4m3fnuz]}")).cell("fp8", "gfx942")
    assert (split.path_of(("e4m3fnuz",)), split.path_of(("e4m3fnuz", "e4m3fn"))) == (Path.NATIVE, Path.EMULATED)
    assert table().cell("fp8", "gfx942").path_of(("e4m3fn",)) is Path.NATIVE
    assert table().cell("int8_per_token_head", "gfx942").path_of(("int8",)) is Path.EMULATED_SLOW
    assert table().cell("fp8", "sm_80").path_of(("e4m3fn",)) is None


def test_features_of_a_device_name_are_not_part_of_the_arch() -> None:
    assert arch_token("gfx942:sramecc+:xnack-") == "gfx942"
    assert table().cell("bfloat16", "gfx942:sramecc+:xnack-").arch == "gfx942"


@pytest.mark.parametrize("arch", ["gfx940", "gfx94", "sm_86", "sm_80a", "GFX942", "9.0", ""])
def test_an_unknown_arch_is_refused_and_never_likened(arch: str) -> None:
    with pytest.raises(UnsupportedMode, match=r"sm_80, gfx942, gfx1100.*add "):
        table().cell("bfloat16", arch)
    with pytest.raises(UnsupportedMode, match="no other arch's is used"):
        table().operation("alibi", arch)


@pytest.mark.parametrize(
    ("arch", "nearest"),
    [
        ("gfx941", "nearest in number: 'gfx942'"),
        ("gfx90c:xnack-", "nearest in number: 'gfx942'"),
        ("gfx1036", "nearest in number: 'gfx1100'"),
        ("sm_120a", "nearest in number: 'sm_80'"),
        ("GFX_942", "nearest in spelling: 'gfx942'"),
        ("MI300X", "none is near; an arch is written like 'sm_80'"),
        ("", "none is near"),
    ],
)
def test_an_unknown_arch_is_told_the_nearest_known_one_and_how_to_add_a_row(arch: str, nearest: str) -> None:
    with pytest.raises(UnsupportedMode, match=r"add .* to 'archs' there, with a row for each mode") as caught:
        table().cell("bfloat16", arch)
    assert nearest in str(caught.value)


def test_an_unknown_mode_or_operation_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fp8_e4m3'"):
        table().cell("fp8_e4m4", "gfx942")
    with pytest.raises(ConfigError, match="known: release_visibly"):
        table().operation("teleport", "gfx942")


def test_shape_limits_give_a_reason() -> None:
    cell = table().cell("int8_per_token_head", "sm_80")
    assert cell.head_dim == Limits(16, 256, 16)
    assert cell.shape_problem(Shapes.of(spec(), cell.mode)) == ""
    assert cell.shape_problem(Shapes.of(spec(head_dim=8), cell.mode)) == "head_dim 8 is below 16"
    assert cell.shape_problem(Shapes.of(spec(head_dim=512), cell.mode)) == "head_dim 512 is above 256"
    assert cell.shape_problem(Shapes.of(spec(head_dim=72), cell.mode)) == "head_dim 72 is not a multiple of 16"
    assert cell.shape_problem(Shapes.of(spec(block_size=1), cell.mode)) == "block_size 1 is not a multiple of 16"


def test_shapes_are_those_of_the_stores_in_the_mode() -> None:
    mixed = CacheSpec.uniform(
        mode=("int8_per_token_head", "bfloat16"), num_layers=2, num_kv_heads=2, head_dim=64, head_dim_v=128
    )
    assert Shapes.of(mixed, "int8_per_token_head") == Shapes((64,), (16,))
    assert Shapes.of(mixed, "bfloat16") == Shapes((128,), (16,))
    assert Shapes.of(mixed, "float16") == Shapes((), ())


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (", float16]", "]", ["fake.yaml:4:3: modes: 'float16' has no row for sm_80, gfx942, gfx1100"]),
        ("[sm_80, gfx1100], m", "[gfx1100], m", ["'fp8_e4m3' has no row for sm_80", "head' has no row for sm_80"]),
        (
            "[gfx942], m",
            "[gfx942, sm_80], m",
            ["fake.yaml:6:5: modes: 'fp8_e4m3' on 'sm_80' is answered twice (first at"],
        ),
        ("alibi, ", "", ["operations: 'alibi' has no row for sm_80"]),
        (
            "peer_copy]",
            "peer_copy, alibi]",
            ["fake.yaml:11:5: operations: 'alibi' on 'sm_80', 'gfx942', 'gfx1100' is answered twice"],
        ),
        ("fp8_e5m2", "fp8_e5m3", ["fake.yaml:7:26: modes: 'fp8_e5m3' is unknown", "'fp8_e5m2' has no row"]),
        ("int4_per_token_head], s", "int4_per_token_head, fp8], s", ["modes: 'fp8' is unknown"]),
        ("tree_mask", "tree_masks", ["'tree_masks' is unknown", "'tree_mask' has no row"]),
        ("broken", "maybe", ["fake.yaml:7:46: support 'maybe' is unknown; known: run, experimental, broken, refused"]),
        ("emulated_slow", "fast", ["fake.yaml:8:98: path 'fast' is unknown"]),
        (
            "path: native}",
            "paths: native}",
            ["fake.yaml:4:60: a row of modes: key 'paths' is unknown", "'path' is missing"],
        ),
        ("support: refused, r", "support: refused, path: native, r", ["fake.yaml:6:94: a refused mode has no path"]),
        ("reason: no kernel yet, ", "", ["fake.yaml:7:5: support 'broken' needs a reason"]),
        ("reason: no kernel yet", "reason: ' '", ["fake.yaml:7:78: reason must be a text that is not blank"]),
        ("reason: not here", "links: [a]", ["fake.yaml:10:5: support 'refused' needs a reason"]),
        (
            "instead: [int8_per_token_head]",
            "instead: [fp8_e5m2]",
            ["fake.yaml:6:124: instead of 'fp8_e4m3': 'fp8_e5m2' is"],
        ),
        ("instead: [int8_per_token_head]", "instead: [fp8_e4m3]", ["is the mode of the row itself"]),
        ("instead: [int8_per_token_head]", "instead: [int8]", ["fake.yaml:6:125: instead: 'int8' is unknown"]),
        ("encoding: e4m3fnuz", "encoding: e5m2", ["encoding of mode 'fp8_e4m3' is 'e5m2'; it must be one of e4m3fn"]),
        (
            "encodings: [e4m3fn, e4m3fnuz]",
            "encodings: [int8]",
            ["fake.yaml:5:122: encodings of mode 'fp8_e4m3': 'int8' is"],
        ),
        ("min: 16", "min: 512", ["fake.yaml:8:145: head_dim: min 512 is above max 256"]),
        ("min: 16", "min: 0", ["fake.yaml:8:151: head_dim.min must be a whole number of 1 or more, found 0"]),
        ("min: 16", "least: 16", ["head_dim: key 'least' is unknown"]),
        ("{multiple_of: 16}}", "{}}", ["fake.yaml:8:195: block_size limits nothing"]),
        ("{multiple_of: 16}}", "16}", ["fake.yaml:8:195: block_size must be a mapping"]),
        ("archs: [gfx942], m", "archs: [gfx943], m", ["fake.yaml:5:14: archs: 'gfx943' is unknown"]),
        ("gfx1100]\nmodes", "gfx1100, 'gfx90a:xnack+']\nmodes", ["'gfx90a:xnack+' is not an arch token"]),
        ("archs: [sm_80, gfx942, gfx1100]\n", "archs: []\n", ["fake.yaml:2:8: archs names no arch"]),
        ("platform: fake", "platform: 7", ["fake.yaml:1:11: platform must be a text"]),
        (
            "platform: fake",
            "platform: fake\nplatform: other",
            ["fake.yaml:2:1: the key 'platform' stands here a second time; first on line 1"],
        ),
        ("platform: fake", "vendor: fake", ["key 'vendor' is unknown", "key 'platform' is missing"]),
        ("support: run, path: native}", "support: run, path: native, torch: '>=2'}", ["key 'torch' is unknown"]),
        ("e4m3fnuz]}", "e4m3fnuz], native: [e5m2]}", ["native of mode 'fp8_e4m3': 'e5m2' is unknown"]),
        (
            "path: emulated,",
            "path: emulated, native: [e5m2],",
            ["native lists encodings of a row whose path is native"],
        ),
    ],
)
def test_a_table_that_is_not_total_or_not_clear_does_not_load(old: str, new: str, expected: list[str]) -> None:
    assert old in FAKE
    found = problems(FAKE.replace(old, new, 1))
    for text in expected:
        assert any(text in problem for problem in found), found


def test_every_problem_is_raised_together() -> None:
    found = problems(FAKE.replace("broken", "maybe").replace("min: 16", "min: 0").replace("alibi, ", ""))
    # A row that cannot be read still claims its answers: it is not reported as missing as well.
    assert len(found) == 3
    assert all(problem.startswith("fake.yaml:") for problem in found)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("reason: no kernel yet", "reason: *why", "fake.yaml:7:78: the alias *why is not allowed"),
        ("support: broken", "<<: {support: broken}", "fake.yaml:7:37: the merge key << is not allowed"),
        ("archs: all, modes: [fp8_e5m2]", "archs: &a all, modes: [fp8_e5m2]", "fake.yaml:7:13: the anchor &a is not"),
        ("path: emulated,", "path: emulated, path: native,", "fake.yaml:7:70: the key 'path' stands here a second"),
        ("min: 16", "min: 010", "fake.yaml:8:151: YAML reads 010 as an octal number"),
    ],
)
def test_what_yaml_itself_makes_doubtful_is_reported_once(old: str, new: str, expected: str) -> None:
    (problem,) = problems(FAKE.replace(old, new, 1))
    assert problem.startswith(expected)


def test_a_problem_shows_its_line() -> None:
    (problem,) = problems("platform: 7\n" + FAKE.split("\n", 1)[1])
    assert problem.split("\n")[1:] == ["    1 | platform: 7", "      |           ^"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "fake.yaml: the file is empty"),
        ("a: b: c", "fake.yaml:1:5: this is not valid YAML"),
        ("a: \x00", "fake.yaml:1:4: the character U+0000 may not stand in YAML"),
        ("- platform", "fake.yaml:1:1: the top of the file is a list; it must be a mapping"),
        ("platform: x\narchs: [a]\nmodes: 3\noperations: {}", "fake.yaml:3:8: modes must be a list"),
    ],
)
def test_a_text_that_is_no_table_says_why(text: str, expected: str) -> None:
    assert any(problem.startswith(expected) for problem in problems(text))


def test_a_file_that_cannot_be_read_or_is_for_another_platform_is_an_error(tmp_path: FilePath) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: the file does not exist"):
        CapabilityTable.load(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"platform: \xff")
    with pytest.raises(ConfigError, match=r"latin\.yaml:1:11: the file is not UTF-8: byte 0xff"):
        CapabilityTable.load(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match="for platform 'cpu', but 'cuda' loads it"):
        CapabilityTable.load(CPU, platform="cuda")


def test_the_cpu_table_runs_every_mode_in_every_encoding() -> None:
    found = CapabilityTable.load(CPU, platform="cpu")
    assert found.archs == ("x86_64", "aarch64")
    for cell in found.cells.values():
        assert cell.support is Support.RUN
        assert cell.encoding == MODES[cell.mode].encodings[0]
        assert cell.encodings == MODES[cell.mode].encodings
        is_plain = cell.mode in ("bfloat16", "float16")
        assert cell.path is (Path.NATIVE if is_plain else Path.EMULATED)
        assert is_plain or "in software" in cell.reason
    lines = CPU.read_text(encoding="utf-8").splitlines()
    for cell in found.cells.values():
        file, _, line = cell.rule.rpartition(":")
        assert file == "kvhal_cpu/capabilities.yaml"
        assert lines[int(line) - 1].lstrip().startswith("- archs")


def test_the_cpu_table_says_what_a_cpu_lacks() -> None:
    found = CapabilityTable.load(CPU, platform="cpu")
    support = {name: found.operation(name, "aarch64").support for name in OPERATIONS}
    assert support.pop("release_visibly") is Support.RUN
    assert support.pop("virtual_memory_remap") is Support.BROKEN
    assert set(support.values()) == {Support.REFUSED}
