"""The front door: a platform and one of its devices, and the one-way flow decide -> plan -> allocate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvhal import policy as policies
from kvhal.capability.table import CapabilityTable
from kvhal.capability.tables import proved
from kvhal.capability.versions import Versions
from kvhal.contract import Adopted, Platform
from kvhal.decision import Policy, SpecDecision
from kvhal.detection import registry
from kvhal.detection.host import HostFacts
from kvhal.detection.installed import installed_versions
from kvhal.detection.probe import DeviceFacts
from kvhal.errors import PlatformError
from kvhal.layout import Order
from kvhal.lease import CacheLease
from kvhal.page import LayoutKind
from kvhal.plan import Addressing, OnLeak, Plan, make_plan
from kvhal.profile import Profiling
from kvhal.readings import MemoryReading
from kvhal.spec import CacheSpec

__all__ = ["Hal", "detect", "get"]


@dataclass(frozen=True, slots=True)
class Hal:
    """One device of one platform. reason: why this platform was chosen. evidence: further folders of evidence files.

    versions: what is installed here; for those that are None the table answers as it assumes them.
    """

    platform: Platform
    device: DeviceFacts
    reason: str = ""
    evidence: tuple[Path, ...] = ()
    versions: Versions = Versions()  # noqa: RUF009  # frozen

    def decide(self, spec: CacheSpec, policy: Policy | None = None) -> SpecDecision:
        """What happens to each mode of `spec` here: run, a fallback the policy lists, or a refusal with reason."""
        table, arch = self.capabilities(), self.device.arch
        return policies.decide_spec(table, arch, spec, policy or Policy(), versions=self.versions)

    def capabilities(self) -> CapabilityTable:
        """The platform's table in the light of the evidence: shipped, the user's own, and that of `evidence`."""
        return proved(self.platform.capabilities(), self.evidence, versions=self.versions)

    def plan(
        self,
        spec: CacheSpec,
        num_blocks: int | Mapping[str, int],
        *,
        max_seqs: int = 64,
        max_tokens: int | None = None,
        max_context: int | None = None,
        layout: str = LayoutKind.TILED,
        order: str = Order.LAYER_MAJOR,
        page_align: int = 16,
        page_stride: int | None = None,
        addressing: str = Addressing.CHECKED,
        on_leak: str = OnLeak.REVOKE,
        policy: Policy | None = None,
        decision: SpecDecision | None = None,
    ) -> Plan:
        """Every byte of a cache, before one is taken. Pure: touches no device.

        num_blocks: blocks in every group, or by group name. max_seqs, max_tokens (default max_seqs), max_context
        (tokens; default: what the blocks hold) size the step. Raises UnsupportedMode if the decision is a refusal,
        ConfigError for what cannot be laid out.
        """
        made = decision or self.decide(spec, policy)
        kernels = [self.platform.kernels(mode, self.device.arch) for mode in made.effective_spec.modes]
        return make_plan(
            made,
            num_blocks,
            [k.workspace_bytes for k in kernels],
            max_seqs=max_seqs,
            max_tokens=max_tokens,
            max_context=max_context,
            layout=layout,
            order=order,
            page_align=page_align,
            page_stride=page_stride,
            addressing=addressing,
            on_leak=on_leak,
        )

    def allocate(self, plan: Plan, memory: Adopted | None = None) -> CacheLease:
        """A live lease; see `Platform.allocate`."""
        return self.platform.allocate(plan, self.device, memory)

    def profiling(self, plan: Plan) -> Profiling:
        """`with hal.profiling(plan) as trial: …`; the scope owns the trial lease. Its `.profile` is the result."""
        return self.platform.profiling(plan, self.device)

    def memory(self) -> MemoryReading:
        """The device's memory now."""
        return self.platform.memory(self.device)


def detect(device: int = 0, *, platform: str | None = None, host: HostFacts | None = None) -> Hal:
    """The platform of this torch build and its device `device` (logical index). Starts no GPU runtime.

    platform: a request, as from a deployment file; KVHAL_PLATFORM is one too. Raises PlatformError if a request
    contradicts the build or the device is not there. host: injected facts, for tests.
    """
    facts = host or HostFacts.read()
    choice = registry.choose(facts, registry.requested_platform(facts.env, platform), registry.adapters())
    for found in choice.probe.devices:
        if found.index == device:
            return Hal(registry.load(choice.name), found, choice.reason, versions=installed_versions(facts))
    names = ", ".join(f"{d.index}: {d.name} ({d.arch})" for d in choice.probe.devices)
    raise PlatformError(
        f"device {device} of platform {choice.name!r} was asked for; found: {names}; choose one of these"
    )


def get(name: str, device: int = 0) -> Hal:
    """The platform called `name`. As `detect`, with a request: PlatformError if it contradicts the torch build."""
    return detect(device, platform=name)
