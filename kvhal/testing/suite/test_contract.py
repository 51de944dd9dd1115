"""Every member of the Platform protocol is there and answers in its types."""

from __future__ import annotations

import torch
from torch import Tensor

from kvhal import modes
from kvhal.capability.cells import OPERATIONS, Cell, Operation
from kvhal.contract import CONTRACT_VERSION, KernelSet, Platform
from kvhal.kernels.fingerprint import REFERENCE, fingerprint
from kvhal.kernels.geometry import LayerGeometry
from kvhal.policy import decide
from kvhal.readings import Known, MemoryReading, Unknown
from kvhal.testing.cases import OPT_IN, Case, Claim, Subject
from kvhal.torch_platform import TorchPlatform


def test_every_member_of_the_protocol_is_there(subject: Subject) -> None:
    platform = subject.hal.platform
    methods = [n for n, member in vars(Platform).items() if callable(member) and not n.startswith("_")]
    assert methods
    assert [name for name in methods if not callable(getattr(platform, name))] == []
    assert platform.name == subject.hal.device.platform
    assert platform.contract in (CONTRACT_VERSION, CONTRACT_VERSION - 1)


def test_the_order_of_steps_is_not_overridden(subject: Subject) -> None:
    if isinstance(subject.hal.platform, TorchPlatform):
        own = type(subject.hal.platform)
        for name in ("allocate", "profile", "profiling", "cleanup"):
            assert getattr(own, name) is getattr(TorchPlatform, name), f"{name} is final"


def test_a_probe_lists_the_device_and_repeats_itself(subject: Subject) -> None:
    first, second = subject.hal.platform.probe(), subject.hal.platform.probe()
    assert first.platform == subject.hal.platform.name
    assert [d.index for d in first.devices] == list(range(len(first.devices)))
    assert [(d.index, d.arch, d.name, d.uuid) for d in first.devices] == [
        (d.index, d.arch, d.name, d.uuid) for d in second.devices
    ]
    assert all(isinstance(d.memory, (Known, Unknown)) for d in first.devices)


def test_the_arch_is_one_the_table_knows(subject: Subject) -> None:
    assert subject.hal.device.arch in subject.table.archs, "the table has no row for this device: add its arch"


def test_the_table_answers_every_mode_and_operation(subject: Subject) -> None:
    table = subject.table
    for arch in table.archs:
        assert all(isinstance(table.cell(mode, arch), Cell) for mode in modes.MODES)
        assert all(isinstance(table.operation(name, arch), Operation) for name in OPERATIONS)


def test_every_suggestion_of_the_table_is_accepted(subject: Subject) -> None:
    table = subject.table
    for mode, arch in table.mode_rows:
        decision = decide(table, arch, mode, OPT_IN)
        for name in decision.alternatives:
            assert not decide(table, arch, name, OPT_IN).refused, f"{mode} on {arch} suggests {name}"


def test_a_reading_says_every_figure_or_why_not(subject: Subject) -> None:
    reading = subject.hal.memory()
    assert isinstance(reading, MemoryReading)
    for figure in (reading.total, reading.free, reading.own, reading.peak):
        assert isinstance(figure, (Known, Unknown))
        if isinstance(figure, Known):
            assert figure.value >= 0
            assert figure.source
        else:
            assert figure.reason


def test_reserved_memory_is_the_devices_and_of_the_size_asked(subject: Subject) -> None:
    storage = subject.hal.platform.reserve(4096, subject.hal.device)
    assert isinstance(storage, torch.UntypedStorage)
    assert storage.nbytes() == 4096
    assert storage.device.type == subject.device.type
    assert storage.data_ptr() % 16 == 0


def test_the_steps_answer(subject: Subject) -> None:
    platform, device = subject.hal.platform, subject.hal.device
    assert isinstance(subject.device, torch.device)
    assert platform.is_capturing(device) is False
    platform.synchronize(device)
    platform.reset_peak(device)
    platform.trim(device)


def test_the_kernels_are_those_that_the_table_names(claim: Claim) -> None:
    """What evidence is about must be the same whether read from the table's file or from the adapter."""
    platform, arch = claim.hal.platform, claim.hal.device.arch
    found = platform.kernels(claim.cell.mode, arch)
    assert isinstance(found, KernelSet)
    assert found.sources == (claim.subject.table.kernels or REFERENCE)
    assert fingerprint(found.sources).sha256


def test_the_scratch_formula_is_what_the_plan_counts(case: Case) -> None:
    plan = case.plan()
    found = case.claim.hal.platform.kernels(case.claim.cell.mode, case.claim.hal.device.arch)
    geometry = LayerGeometry.of(plan.layout, 0)
    sizes = [found.workspace_bytes(geometry, case.shape.q_heads, tokens) for tokens in (1, 4, 64)]
    assert sizes == sorted(sizes), "scratch may not shrink with more tokens"
    assert plan.step_layout(plan.layout.groups[0]).workspace_bytes >= sizes[1]


def test_a_lease_lies_on_the_torch_device(claim: Claim) -> None:
    with claim.hal.allocate(claim.plan()) as lease:
        found: Tensor = lease.cache_tensor()
        assert found.device.type == claim.subject.device.type
        del found
