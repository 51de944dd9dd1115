"""Tests that need a GPU: deselected where there is none, and counted in the summary. Never skipped in silence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvhal.detection.host import HostFacts
from kvhal.detection.probe import Probe
from kvhal.hal import Hal
from kvhal.torch_cuda import Seams, TorchCudaPlatform
from kvhal_cuda import CudaPlatform
from kvhal_rocm import RocmPlatform

MASQUERADE = "rocm as a masquerade"
_DESELECTED = pytest.StashKey[tuple[int, str]]()


def adapter(name: str) -> TorchCudaPlatform:
    """The adapter called `name` on this machine."""
    if name == "cuda":
        return CudaPlatform()
    if name == "rocm":
        return RocmPlatform()
    facts = HostFacts.read()
    env = {**facts.env, "KVHAL_MASQUERADE": "rocm"}
    masked = HostFacts(facts.torch_version, facts.torch_cuda, facts.torch_hip, env, facts.machine, facts.witnesses)
    return RocmPlatform(Seams(host=masked))


def adapters_here() -> tuple[str, ...]:
    """The adapters that this torch build can run, real or masked."""
    facts = HostFacts.read()
    return ("rocm",) if facts.torch_hip else ("cuda", MASQUERADE)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU; deselected and counted where there is none")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gpu" in metafunc.fixturenames:
        metafunc.parametrize("gpu", adapters_here(), indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A driver that fails is no missing device: its DeviceError stops the run."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    probe = adapter(adapters_here()[0]).probe()
    if probe.devices:
        return
    items[:] = [item for item in items if item not in set(marked)]
    config.hook.pytest_deselected(items=marked)
    config.stash[_DESELECTED] = (len(marked), probe.absent)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _DESELECTED in config.stash:
        count, why = config.stash[_DESELECTED]
        terminalreporter.write_line(f"{count} GPU test(s) were deselected and prove nothing here: {why}")


@pytest.fixture(scope="module")
def gpu(request: pytest.FixtureRequest) -> Iterator[Hal]:
    """An adapter on its first device, with the context and the first launches behind it: they keep memory for good."""
    platform = adapter(request.param)
    probe: Probe = platform.probe()
    assert not probe.absent
    found = Hal(platform, probe.devices[0], "a test")
    platform.confirm(found.device)
    warm_up(found)
    yield found
    platform.trim(found.device)


def warm_up(found: Hal) -> None:
    """The first launches and the first capture keep up to 160 MiB that never come back (design, section 7)."""
    import torch

    device = found.platform.torch_device(found.device)
    x = torch.zeros(1 << 20, device=device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        x.add_(1)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        x.add_(1)
    graph.replay()
    torch.cuda.synchronize(device)
    assert float(x[0]) == 2
    graph.reset()
