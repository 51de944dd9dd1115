"""Finds the adapters by entry point and picks the platform. The one place that knows what a torch build stands for.

The torch build decides; an adapter's probe says whether a device is there; every other source only corroborates, and
toolkit files never count. An adapter is imported when it is first needed, so a broken one harms nobody else.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, cast

from kvhal.contract import CONTRACT_VERSION, Platform
from kvhal.detection.host import Failed, HostFacts, Present
from kvhal.detection.probe import Probe
from kvhal.errors import KvhalError, PlatformError

__all__ = [
    "Choice",
    "Probing",
    "Registry",
    "adapters",
    "built_for",
    "choose",
    "installed",
    "load",
    "names",
    "requested_platform",
]

GROUP = "kvhal.platforms"
ENV_NAME = "KVHAL_PLATFORM"
# Test only: lets one GPU adapter run on the other vendor's build, to exercise its calls. It never counts as evidence.
MASQUERADE = "KVHAL_MASQUERADE"
AUTO = "auto"
CPU = "cpu"
BUILDS = {"cuda": "CUDA", "rocm": "HIP (ROCm)"}
# The kernel module whose version is the driver's, where it tells one.
DRIVER_MODULES = {"cuda": "nvidia", "rocm": "amdgpu"}
GPU_SOURCES = {"cuda": ("nvml", "nvidia_node", "dxg"), "rocm": ("kfd", "dxg", "amdsmi")}


class Probing(Protocol):
    """Anything that answers a probe: an adapter, or one that is imported when asked."""

    def probe(self) -> Probe: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """The platform picked, why, everything that was found on the way, and its probe (at least one device)."""

    name: str
    reason: str
    found: tuple[str, ...]
    probe: Probe


@dataclass(frozen=True, slots=True)
class Registry:
    """The adapters offered by installed distributions. Two that offer one name are refused when that name is used."""

    entries: tuple[EntryPoint, ...]

    @classmethod
    def installed(cls) -> Registry:
        return cls(tuple(entry_points(group=GROUP)))

    def names(self) -> tuple[str, ...]:
        return tuple(sorted({entry.name for entry in self.entries}))

    def load(self, name: str) -> Platform:
        """A new adapter called `name`. Raises PlatformError, naming the distribution, for any that cannot serve."""
        entry = self.entry(name)
        asked = f"platform {name!r} of distribution {_distribution(entry)!r} ({entry.value})"
        try:
            adapter = entry.load()
            _check_contract(asked, adapter.contract)
            platform = cast("Platform", adapter())
            own_name = platform.name
        except KvhalError:
            raise
        except Exception as exc:  # a stranger's module may raise anything; the caller gets it as the cause
            raise PlatformError(
                f"{asked} was asked for and cannot be loaded: {type(exc).__name__}: {exc}; "
                f"mend or uninstall that distribution, or set {ENV_NAME}={CPU}"
            ) from exc
        if own_name != name:
            raise PlatformError(f"{asked} calls itself {own_name!r}; its author must give both the same name")
        return platform

    def entry(self, name: str) -> EntryPoint:
        """Where the adapter called `name` enters; nothing is imported. Raises PlatformError if none or several do."""
        offers = {(_distribution(e), e.value): e for e in self.entries if e.name == name}
        if not offers:
            raise PlatformError(
                f"platform {name!r} was asked for and no installed distribution offers it; "
                f"installed: {', '.join(self.names()) or 'none'}; install its adapter"
            )
        if len(offers) > 1:
            rivals = " and ".join(f"{d!r} ({value})" for d, value in sorted(offers))
            raise PlatformError(f"platform {name!r} was asked for and is offered by {rivals}; uninstall all but one")
        return next(iter(offers.values()))


@functools.cache
def installed() -> Registry:
    """The registry of this process, read once."""
    return Registry.installed()


def names() -> tuple[str, ...]:
    """The platforms that installed distributions offer, sorted; nothing is imported."""
    return installed().names()


@functools.cache
def load(name: str) -> Platform:
    """The adapter called `name`, imported on first use; the same object ever after."""
    return installed().load(name)


@dataclass(frozen=True, slots=True)
class _Lazy:
    name: str

    def probe(self) -> Probe:
        return load(self.name).probe()


def adapters() -> Mapping[str, Probing]:
    """Every installed adapter by name, for `choose`; each is imported when it is first probed."""
    return {name: _Lazy(name) for name in names()}


def built_for(torch_cuda: str | None, torch_hip: str | None) -> str:
    """The platform that a torch build stands for, by its `torch.version.cuda` and `.hip`."""
    return "rocm" if torch_hip else "cuda" if torch_cuda else CPU


def requested_platform(env: Mapping[str, str], configured: str | None = None) -> str | None:
    """What the user asked for in KVHAL_PLATFORM or the deployment's `platform:`; None where neither asks ("auto").

    Values are taken letter for letter. Raises PlatformError if both ask and differ.
    """
    asked = {ENV_NAME: env.get(ENV_NAME), "the deployment's platform": configured}
    said = {source: value for source, value in asked.items() if value not in (None, AUTO)}
    if len(set(said.values())) > 1:
        both = " and ".join(f"{source} {value!r}" for source, value in said.items())
        raise PlatformError(f"{both} contradict each other; set one of them, or both to the same platform")
    return next(iter(said.values()), None)


def choose(host: HostFacts, requested: str | None, available: Mapping[str, Probing]) -> Choice:
    """The platform for this host: the one requested if it can be, else what the torch build stands for, else the CPU.

    requested: an exact name, or None or "auto". available: adapters by name, probed only if they come into question.
    Raises PlatformError with everything that was found; a DeviceError of a probe is passed on, since a driver that
    fails is not a device that is absent.
    """
    built = built_for(host.torch_cuda, host.torch_hip)
    if requested is None or requested == AUTO:
        return _unrequested(host, built, available)
    if requested not in {*available, *BUILDS, CPU}:
        raise PlatformError(f"{_unknown(requested, available)}; {_found(host)}")
    masked = built in BUILDS and requested in BUILDS and host.env.get(MASQUERADE) == requested != built
    if requested in BUILDS and requested != built and not masked:
        raise PlatformError(
            f"platform {requested!r} was requested; this torch ({host.torch_version}) has no {BUILDS[requested]}, "
            f"it is built for {built!r}; {_found(host)}; install a torch built for {requested!r}, or request {built!r}"
        )
    probe = _probe(host, requested, available)
    if not probe.devices:
        raise PlatformError(
            f"platform {requested!r} was requested and has no usable device: {_why_absent(host, probe)}; "
            f"{_found(host)}; mend that, or set {ENV_NAME}={CPU}"
        )
    mask = f" as a masquerade ({MASQUERADE}) on a torch built for {built!r}: test only, never evidence"
    return _choice(host, probe, f"platform {requested!r} was requested{mask if masked else ''}")


def _unrequested(host: HostFacts, built: str, available: Mapping[str, Probing]) -> Choice:
    probe = _probe(host, built, available)
    reason = _build_reason(host, built)
    if not probe.devices and built != CPU:
        reason = f"{reason}, but {built!r} has no usable device: {_why_absent(host, probe)}"
        probe = _probe(host, CPU, available)
    if not probe.devices:
        raise PlatformError(f"the CPU adapter lists no CPU: {_why_absent(host, probe)}; {_found(host)}; mend that")
    return _choice(host, probe, reason)


def _build_reason(host: HostFacts, built: str) -> str:
    if built != CPU:
        return f"this torch ({host.torch_version}) is built for {BUILDS[built]}"
    sources = dict.fromkeys(name for of_build in GPU_SOURCES.values() for name in of_build)
    seen = [f"{name}: {w.detail}" for name in sources if isinstance(w := host.witnesses[name], Present)]
    reason = f"this torch build ({host.torch_version}) has no CUDA and no HIP"
    if not seen:
        return reason
    return f"a GPU was seen ({'; '.join(seen)}) but {reason}; install a torch built for it to use it"


def _probe(host: HostFacts, name: str, available: Mapping[str, Probing]) -> Probe:
    if name not in available:
        raise PlatformError(
            f"this torch ({host.torch_version}) asks for platform {name!r}, whose adapter is not installed; "
            f"installed: {', '.join(sorted(available)) or 'none'}; {_found(host)}; "
            f"install the adapter, or set {ENV_NAME}={CPU}"
        )
    probe = available[name].probe()
    if probe.platform != name:
        raise PlatformError(
            f"the adapter of {name!r} answered a probe as {probe.platform!r}; its author must mend that"
        )
    return probe


def _why_absent(host: HostFacts, probe: Probe) -> str:
    """The adapter's reason, and the sources of that vendor that failed (a permission, a driver)."""
    sources = GPU_SOURCES.get(probe.platform, ())
    failed = [f"{name}: {w.reason}" for name in sources if isinstance(w := host.witnesses[name], Failed)]
    return "; ".join([probe.absent or "its probe lists no device and gives no reason", *failed])


def _choice(host: HostFacts, probe: Probe, reason: str) -> Choice:
    return Choice(probe.platform, reason, (*host.found(), *probe.notes), probe)


def _found(host: HostFacts) -> str:
    return "found: " + "; ".join(host.found())


def _unknown(requested: str, available: Iterable[str]) -> str:
    valid = sorted({*available, *BUILDS, CPU, AUTO})
    close = difflib.get_close_matches(requested.strip().lower(), valid, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"platform {requested!r} was requested and is unknown; valid, letter for letter: {', '.join(valid)}{hint}"


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "unknown"


def _check_contract(asked: str, version: object) -> None:
    if version not in (CONTRACT_VERSION, CONTRACT_VERSION - 1) or isinstance(version, bool):
        raise PlatformError(
            f"{asked} implements contract {version!r}; this kvhal reads {CONTRACT_VERSION} and {CONTRACT_VERSION - 1}; "
            "install versions of both that agree"
        )
