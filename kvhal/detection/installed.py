"""Which versions are installed here, as far as files tell: torch is not imported and nothing is started.

A version that cannot be read, or is none, is unknown (None): tables answer for what they assume instead.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvhal.capability.versions import DIMENSIONS, Versions, release
from kvhal.detection.host import HostFacts
from kvhal.detection.registry import BUILDS, DRIVER_MODULES, built_for
from kvhal.errors import ConfigError

__all__ = ["KnownVersions", "TorchBuild", "installed_triton", "installed_versions", "versions_for"]


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What torch/version.py says of the build that is installed; None where there is no such thing."""

    version: str | None = None
    cuda: str | None = None
    hip: str | None = None

    @classmethod
    def read(cls) -> TorchBuild:
        said = _constants("torch", "version.py")
        return cls(said.get("__version__"), said.get("cuda"), said.get("hip"))

    @classmethod
    def of(cls, host: HostFacts) -> TorchBuild:
        return cls(host.torch_version, host.torch_cuda, host.torch_hip)


@dataclass(frozen=True, slots=True)
class KnownVersions:
    """The versions to answer for. sources: "given" or "installed here", by dimension; the rest is not known."""

    versions: Versions
    sources: Mapping[str, str]


def installed_versions(host: HostFacts | None = None, root: Path = Path("/")) -> Versions:
    """The versions here. host: facts that are read already; without them torch's own files are, and no torch."""
    build = TorchBuild.read() if host is None else TorchBuild.of(host)
    module = DRIVER_MODULES.get(built_for(build.cuda, build.hip))
    found = {
        "torch": build.version,
        "triton": installed_triton(),
        "cuda": build.cuda,
        "rocm": build.hip,
        "driver": None if module is None else _module_version(root, module),
    }
    return Versions(**{dimension: text for dimension, text in found.items() if text is not None and _is_version(text)})


def installed_triton() -> str | None:
    """The version of the module `triton`, which several distributions provide, or None."""
    return _constants("triton", "__init__.py").get("__version__")


def versions_for(platform: str, given: Versions | None = None) -> KnownVersions:
    """Those given, and for the rest what is installed here, if `platform` is what this machine's torch is built for."""
    asked = given or Versions()
    build = TorchBuild.read()
    is_ours = platform not in BUILDS or platform == built_for(build.cuda, build.hip)
    here = installed_versions() if is_ours else Versions()
    sources = {
        d: "given" if d in asked.known else "installed here" for d in DIMENSIONS if d in asked.or_else(here).known
    }
    return KnownVersions(asked.or_else(here), sources)


def _constants(package: str, file: str) -> dict[str, str]:
    """The texts that a file of a package binds at its top level, read without running it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return {}
    try:
        tree = ast.parse(Path(spec.origin).with_name(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    found: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                found[name] = text
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text))):
                found[name] = text
    return found


def _module_version(root: Path, module: str) -> str | None:
    """The version of a loaded kernel module. One that came with the kernel has none of its own."""
    try:
        return (root / "sys/module" / module / "version").read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def _is_version(text: str) -> bool:
    try:
        release(text)
    except ConfigError:
        return False
    return True
