"""The versions an answer may depend on, the conditions that rows put on them, and where those conditions change.

A version stands for its release: `2.13.0+cpu`, `2.13.0.dev20260802`, `2.13.0rc1` and `2.13.0.post1` all compare as
2.13.0. Local parts say how a wheel was built, not what it can do, and a nightly has the code of the release it leads
to; by PEP 440 alone it would be in neither `<2.14` nor `>=2.14`, so no pair of rows could cover every version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from itertools import product
from types import MappingProxyType

from packaging.specifiers import InvalidSpecifier, Specifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from kvhal.errors import ConfigError, Problem, UnsupportedMode

__all__ = [
    "ALWAYS",
    "DIMENSIONS",
    "Conditions",
    "Faults",
    "UnknownVersion",
    "Versions",
    "at_text",
    "faults",
    "meet",
    "release",
    "samples",
    "specifier_problem",
]

# What each version is of. `rocm` is what can be read from a torch build without a toolkit on disk.
DIMENSIONS: Mapping[str, str] = MappingProxyType(
    {
        "torch": "torch.__version__",
        "triton": "triton.__version__, of whichever distribution provides the module",
        "cuda": "the CUDA version that torch was built with (torch.version.cuda)",
        "rocm": "the HIP version that torch was built with (torch.version.hip); up to 7.14 it is ROCm's own number",
        "driver": "the NVIDIA driver, or the amdgpu kernel module",
    }
)

# torch.version.hip may carry a commit: 6.2.41133-dd7f95766.
_WITH_COMMIT = re.compile(r"v?(\d+(?:\.\d+)*)-[0-9A-Za-z]+")
_JUST_BELOW = 999_999


class UnknownVersion(UnsupportedMode):
    """The answer depends on a version that is neither known nor assumed. dimensions: which ones."""

    def __init__(self, message: str, dimensions: tuple[str, ...]) -> None:
        super().__init__(message)
        self.dimensions = dimensions


@cache
def release(text: str) -> Version:
    """The release that the version `text` belongs to. Raises ConfigError if it is no version."""
    commit = _WITH_COMMIT.fullmatch(text.strip())
    try:
        found = Version(commit[1] if commit else text)
    except InvalidVersion:
        raise ConfigError(f"{text!r} is not a version; write it as the package reports it, such as '2.14.1'") from None
    return _version(found.release)


@dataclass(frozen=True, slots=True)
class Versions:
    """What is installed, or asked about; None is unknown. Raises ConfigError for every text that is no version."""

    torch: str | None = None
    triton: str | None = None
    cuda: str | None = None
    rocm: str | None = None
    driver: str | None = None

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        for dimension, text in self.known.items():
            try:
                release(text)
            except ConfigError as exc:
                problems += [Problem(f"{dimension}: {p.message}", p.where, p.excerpt, p.hint) for p in exc.problems]
        if problems:
            raise ConfigError(*problems)

    @property
    def known(self) -> dict[str, str]:
        """The versions that are not None, by dimension."""
        pairs = (
            ("torch", self.torch),
            ("triton", self.triton),
            ("cuda", self.cuda),
            ("rocm", self.rocm),
            ("driver", self.driver),
        )
        return {dimension: text for dimension, text in pairs if text is not None}

    @property
    def releases(self) -> dict[str, Version]:
        """The releases of the known versions, by dimension."""
        return {dimension: release(text) for dimension, text in self.known.items()}

    def or_else(self, other: Versions) -> Versions:
        """These, with those of `other` where these are unknown."""
        return Versions(**{**other.known, **self.known})


assert tuple(f.name for f in fields(Versions)) == tuple(DIMENSIONS)


@dataclass(frozen=True, slots=True)
class Conditions:
    """When a row answers: one specifier a dimension, in the order of DIMENSIONS; all must hold, none holds always."""

    texts: tuple[tuple[str, str], ...] = ()

    @property
    def dimensions(self) -> tuple[str, ...]:
        return tuple(dimension for dimension, _ in self.texts)

    def hold(self, at: Mapping[str, Version]) -> bool:
        """Whether they hold at these releases, which must name each of `dimensions`."""
        return all(_admits(text, at[dimension]) for dimension, text in self.texts)

    def __str__(self) -> str:
        return " and ".join(f"{dimension} {text}" for dimension, text in self.texts) or "any version"


ALWAYS = Conditions()


def specifier_problem(text: str) -> str:
    """What keeps `text` from being a condition on releases, or ""."""
    try:
        parts = list(SpecifierSet(text))
    except InvalidSpecifier:
        return f"{text!r} is not a version specifier; write it as packaging reads it, such as '>=3.5,<3.9'"
    if not parts:
        return "an empty specifier limits nothing; remove it"
    for part in parts:
        if part.operator == "===":
            return f"{text!r} compares texts; conditions compare releases, so write '=='"
        named = Version(part.version.removesuffix(".*"))
        if named != _version(named.release):
            return f"{text!r} names {part.version!r}; conditions name releases, as a version stands for its release"
    return ""


def samples(whens: Iterable[Conditions], over: Iterable[str] | None = None) -> Iterator[dict[str, Version]]:
    """Releases at, just below and just above every edge of every dimension that `whens` name, in all combinations.

    Between two edges of a dimension no condition changes, so what holds at all samples holds at all releases.
    over: only these dimensions.
    """
    edges: dict[str, set[str]] = {}
    for dimension, text in (pair for when in whens for pair in when.texts):
        edges.setdefault(dimension, set()).add(text)
    chosen = [d for d in DIMENSIONS if d in edges and (over is None or d in over)]
    axes = [sorted({v for text in edges[d] for edge in _edges(text) for v in _around(edge)}) for d in chosen]
    for point in product(*axes):
        yield dict(zip(chosen, point, strict=True))


@dataclass(frozen=True, slots=True)
class Faults:
    """Where a set of conditions is no partition of the releases.

    missing: where none holds. twice: where two do, and which two. never: those that hold nowhere.
    """

    missing: tuple[tuple[str, Version], ...] | None
    twice: tuple[tuple[tuple[str, Version], ...], int, int] | None
    never: tuple[int, ...]


@cache
def faults(whens: tuple[Conditions, ...]) -> Faults | None:
    """None if exactly one of `whens` holds at every combination of releases, else where not."""
    missing = twice = None
    held: set[int] = set()
    for at in samples(whens):
        holding = [i for i, when in enumerate(whens) if when.hold(at)]
        held.update(holding)
        if not holding:
            missing = missing or tuple(at.items())
        elif len(holding) > 1:
            twice = twice or (tuple(at.items()), holding[0], holding[1])
    never = tuple(i for i in range(len(whens)) if i not in held)
    return Faults(missing, twice, never) if missing is not None or twice is not None or never else None


@cache
def meet(one: Conditions, other: Conditions) -> bool:
    """Whether there are releases at which both hold."""
    return any(one.hold(at) and other.hold(at) for at in samples((one, other)))


def at_text(at: Iterable[tuple[str, Version | str]]) -> str:
    """Versions as messages name them: "torch 2.9, triton 3.5"."""
    return ", ".join(f"{dimension} {version}" for dimension, version in at)


@cache
def _specifiers(text: str) -> SpecifierSet:
    return SpecifierSet(text)


@cache
def _admits(text: str, version: Version) -> bool:
    return _specifiers(text).contains(version, prereleases=True)


@cache
def _edges(text: str) -> tuple[tuple[int, ...], ...]:
    """The releases at which `text` may change its answer."""
    return tuple(edge for part in _specifiers(text) for edge in _edges_of(part))


def _edges_of(part: Specifier) -> tuple[tuple[int, ...], ...]:
    at = Version(part.version.removesuffix(".*")).release
    if part.version.endswith(".*"):
        return at, (*at[:-1], at[-1] + 1)
    if part.operator == "~=":
        return at, (*at[:-2], at[-2] + 1)
    return (at,)


@cache
def _around(edge: tuple[int, ...]) -> tuple[Version, ...]:
    above = _version((*edge, 0, 0, 1))
    significant = edge
    while significant and significant[-1] == 0:
        significant = significant[:-1]
    if not significant:
        return _version(edge), above
    return _version((*significant[:-1], significant[-1] - 1, _JUST_BELOW)), _version(edge), above


def _version(parts: tuple[int, ...]) -> Version:
    return Version(".".join(map(str, parts)))
