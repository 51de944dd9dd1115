"""Finding adapters and picking the platform. Hosts and probes are invented; everything between them is real."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

import pytest
import torch

from kvhal.contract import CONTRACT_VERSION
from kvhal.detection import registry
from kvhal.detection.host import Absent, Failed, HostFacts, Present, Witness
from kvhal.detection.probe import DeviceFacts, Probe
from kvhal.detection.registry import Choice, Probing, Registry, choose, requested_platform
from kvhal.errors import DeviceError, PlatformError
from kvhal.readings import Known

# torch leaves the type of this function out.
context_is_open: Callable[[], bool] = torch.cuda.is_initialized

BUILDS: dict[str, HostFacts] = {
    "cuda": HostFacts("2.13.0+cu130", torch_cuda="13.0"),
    "rocm": HostFacts("2.13.0+rocm7.2", torch_hip="7.2"),
    "cpu": HostFacts("2.13.0+cpu"),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """An adapter that answers one probe, or raises."""

    says: Probe | Exception

    def probe(self) -> Probe:
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


def present(name: str, arch: str) -> Answer:
    device = DeviceFacts(name, 0, arch, "a device", "", Known(2**30, "fake"))
    return Answer(Probe(name, (device,), notes=(f"{name} probed",)))


def absent(name: str, reason: str) -> Answer:
    return Answer(Probe(name, (), absent=reason))


ALL: dict[str, Probing] = {
    "cpu": present("cpu", "x86_64"),
    "cuda": present("cuda", "sm_90"),
    "rocm": present("rocm", "gfx942"),
}


def host(build: str, **witnesses: Witness) -> HostFacts:
    return replace(BUILDS[build], witnesses=witnesses)


def toolkits(rocm: bool, nvcc: bool) -> dict[str, Witness]:
    return {
        "toolkit_rocm": Present("/opt/rocm") if rocm else Absent("no /opt/rocm"),
        "toolkit_cuda": Present("/usr/bin/nvcc") if nvcc else Absent("no nvcc"),
    }


@pytest.mark.parametrize(("rocm", "nvcc"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("override", [None, "cuda", "rocm", "cpu", "CUDA ", "bogus", ""])
@pytest.mark.parametrize("build", ["cuda", "rocm", "cpu"])
def test_the_torch_build_decides_whatever_toolkits_lie_on_disk(
    build: str, override: str | None, rocm: bool, nvcc: bool
) -> None:
    env = {} if override is None else {"KVHAL_PLATFORM": override}
    facts = replace(host(build, **toolkits(rocm, nvcc)), env=env)
    if override in (None, build, "cpu"):
        choice = choose(facts, requested_platform(facts.env), ALL)
        assert choice.name == (override or build)
        assert choice.probe.devices[0].platform == choice.name
        return
    with pytest.raises(PlatformError) as caught:
        choose(facts, requested_platform(facts.env), ALL)
    message = str(caught.value)
    assert repr(override) in message
    assert f"found: torch {facts.torch_version}" in message
    if override in ALL:
        assert f"this torch ({facts.torch_version}) has no {'CUDA' if override == 'cuda' else 'HIP (ROCm)'}" in message
    else:
        assert "valid, letter for letter: auto, cpu, cuda, rocm" in message


def test_a_near_miss_is_given_a_hint() -> None:
    with pytest.raises(PlatformError, match="did you mean 'cuda'"):
        choose(host("cuda"), "CUDA ", ALL)


@pytest.mark.parametrize(
    ("env", "configured", "expected"),
    [
        ({}, None, None),
        ({}, "auto", None),
        ({"KVHAL_PLATFORM": "auto"}, "rocm", "rocm"),
        ({"KVHAL_PLATFORM": "cuda"}, "auto", "cuda"),
        ({"KVHAL_PLATFORM": "cuda"}, "cuda", "cuda"),
        ({"KVHAL_PLATFORM": ""}, None, ""),
    ],
)
def test_a_request_comes_from_either_source(env: Mapping[str, str], configured: str | None, expected: object) -> None:
    assert requested_platform(env, configured) == expected


def test_two_requests_that_differ_are_named_both() -> None:
    with pytest.raises(PlatformError, match="KVHAL_PLATFORM 'cpu' and the deployment's platform 'rocm' contradict"):
        requested_platform({"KVHAL_PLATFORM": "cpu"}, "rocm")


@pytest.mark.parametrize(
    "library",
    [
        Absent("the Python package amdsmi is not installed"),
        Absent("amdsmi is installed and its driver library is not here: KeyError: 'libamd_smi.so'"),
        Absent("amdsmi lists no device"),
        Failed("amdsmi could not answer: OSError: bad ELF"),
    ],
)
@pytest.mark.parametrize("node", ["kfd", "dxg"])
def test_a_missing_management_library_does_not_hide_a_usable_device(library: Witness, node: str) -> None:
    facts = host("rocm", **{"amdsmi": library, node: Present(f"/dev/{node} is readable and writable")})
    choice = choose(facts, None, ALL)
    assert choice.name == "rocm"
    assert "built for HIP (ROCm)" in choice.reason
    assert f"amdsmi {library}" in choice.found


DENIED = Failed("/dev/kfd exists and this user has no permission to read and write it; join the group that owns it")


def test_a_node_without_permission_is_the_stated_reason_for_the_cpu() -> None:
    no_device: dict[str, Probing] = {**ALL, "rocm": absent("rocm", "KFD lists no usable node")}
    choice = choose(host("rocm", kfd=DENIED), None, no_device)
    assert choice.name == "cpu"
    assert "KFD lists no usable node" in choice.reason
    assert "no permission" in choice.reason
    with pytest.raises(PlatformError, match=r"'rocm' was requested and has no usable device.*no permission.*found:"):
        choose(host("rocm", kfd=DENIED), "rocm", no_device)


@pytest.mark.parametrize("build", ["cuda", "rocm"])
def test_a_gpu_build_without_a_device_is_cpu_only_if_nobody_asked(build: str) -> None:
    none_here: dict[str, Probing] = {**ALL, build: absent(build, "CUDA_VISIBLE_DEVICES='' hides all 2 devices")}
    choice = choose(host(build), None, none_here)
    assert choice.name == "cpu"
    assert "CUDA_VISIBLE_DEVICES='' hides all 2 devices" in choice.reason
    with pytest.raises(PlatformError, match="CUDA_VISIBLE_DEVICES='' hides all 2 devices"):
        choose(host(build), build, none_here)


@pytest.mark.parametrize("requested", [None, "cuda"])
def test_a_driver_that_fails_is_not_a_device_that_is_absent(requested: str | None) -> None:
    broken: dict[str, Probing] = {**ALL, "cuda": Answer(DeviceError("NVML: driver/library mismatch", kind="driver"))}
    with pytest.raises(DeviceError, match="mismatch"):
        choose(host("cuda"), requested, broken)


@pytest.mark.parametrize("name", ["nvidia_node", "nvml", "kfd", "amdsmi", "dxg"])
def test_a_cpu_build_beside_a_gpu_says_why_it_is_the_cpu(name: str) -> None:
    facts = host("cpu", **{name: Present("something is here")})
    choice = choose(facts, None, ALL)
    assert choice.name == "cpu"
    assert f"a GPU was seen ({name}: something is here)" in choice.reason
    assert "no CUDA and no HIP" in choice.reason
    with pytest.raises(PlatformError, match=r"this torch \(2.13.0\+cpu\) has no CUDA"):
        choose(facts, "cuda", ALL)


def test_a_cpu_build_alone_does_not_speak_of_gpus() -> None:
    assert choose(host("cpu", **toolkits(True, True)), "auto", ALL).reason == (
        "this torch build (2.13.0+cpu) has no CUDA and no HIP"
    )


@pytest.mark.parametrize("requested", [None, "cuda"])
def test_a_build_whose_adapter_is_not_installed_says_what_is_and_the_way_out(requested: str | None) -> None:
    with pytest.raises(
        PlatformError, match=r"'cuda', whose adapter is not installed; installed: cpu;.*KVHAL_PLATFORM=cpu"
    ):
        choose(host("cuda"), requested, {"cpu": ALL["cpu"]})


def test_a_strangers_platform_is_taken_only_on_request() -> None:
    with_stranger: dict[str, Probing] = {**ALL, "npu": present("npu", "npu1")}
    assert choose(host("cpu"), None, with_stranger).name == "cpu"
    assert choose(host("cpu"), "npu", with_stranger).reason == "platform 'npu' was requested"


def test_only_the_platform_in_question_is_probed() -> None:
    never = Answer(AssertionError("probed without need"))
    assert choose(host("cpu"), None, {"cpu": ALL["cpu"], "cuda": never, "npu": never}).name == "cpu"


def test_an_adapter_that_answers_under_another_name_is_refused() -> None:
    with pytest.raises(PlatformError, match="adapter of 'cuda' answered a probe as 'rocm'"):
        choose(host("cuda"), None, {**ALL, "cuda": ALL["rocm"]})


def test_a_cpu_adapter_without_a_cpu_is_an_error() -> None:
    with pytest.raises(PlatformError, match="lists no CPU: it hides"):
        choose(host("cpu"), None, {"cpu": absent("cpu", "it hides")})


def test_what_was_found_is_kept_with_the_choice() -> None:
    choice: Choice = choose(host("rocm", **toolkits(False, True)), None, ALL)
    assert choice.found[0] == "torch 2.13.0+rocm7.2: CUDA none, HIP 7.2"
    assert "toolkit_cuda present: /usr/bin/nvcc (toolkit files never count)" in choice.found
    assert choice.found[-1] == "rocm probed"


ADAPTER = """
class Adapter:
    name = {name!r}
    contract = {contract!r}
"""


class Shop:
    """Installs small distributions with real metadata into a folder of sys.path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def install(self, dist: str, source: str, name: str = "stub") -> None:
        module = f"{dist}_adapter"
        self.modules.append(module)
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{dist}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kvhal.platforms]\n{name} = {module}:Adapter\n")

    def registry(self) -> Registry:
        entries: list[EntryPoint] = []
        for dist in distributions(path=[str(self.folder)]):
            entries.extend(dist.entry_points)
        return Registry(tuple(entries))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.syspath_prepend(str(tmp_path))
    found = Shop(tmp_path)
    yield found
    for module in found.modules:
        sys.modules.pop(module, None)


def adapter(name: str = "stub", contract: object = CONTRACT_VERSION) -> str:
    return ADAPTER.format(name=name, contract=contract)


def test_an_adapter_is_imported_when_it_is_loaded(shop: Shop) -> None:
    shop.install("good", adapter())
    found = shop.registry()
    assert found.names() == ("stub",)
    assert "good_adapter" not in sys.modules
    assert found.load("stub").name == "stub"


def test_two_distributions_with_one_name_are_named_both(shop: Shop) -> None:
    shop.install("first", adapter())
    shop.install("second", adapter())
    shop.install("third", adapter("other"), name="other")
    found = shop.registry()
    assert found.names() == ("other", "stub")
    with pytest.raises(PlatformError, match=r"offered by 'first' .* and 'second' "):
        found.load("stub")
    assert found.load("other").name == "other"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_library", ModuleNotFoundError),
        ("raise KeyError('libamd_smi.so')", KeyError),
        ("class Other: pass", AttributeError),
        ("class Adapter: name = 'stub'", AttributeError),
        ("class Adapter:\n    contract = 1\n    def __init__(self): raise OSError('no')", OSError),
    ],
)
def test_an_adapter_that_does_not_load_names_its_distribution(shop: Shop, source: str, cause: type[Exception]) -> None:
    shop.install("broken", source)
    with pytest.raises(PlatformError, match="platform 'stub' of distribution 'broken'") as caught:
        shop.registry().load("stub")
    assert isinstance(caught.value.__cause__, cause)


@pytest.mark.parametrize("contract", [CONTRACT_VERSION, CONTRACT_VERSION - 1])
def test_this_contract_and_the_one_before_load(shop: Shop, contract: int) -> None:
    shop.install("good", adapter(contract=contract))
    assert shop.registry().load("stub").contract == contract


@pytest.mark.parametrize("contract", [CONTRACT_VERSION + 1, CONTRACT_VERSION - 2, "1", True, None])
def test_any_other_contract_is_refused(shop: Shop, contract: object) -> None:
    shop.install("other", adapter(contract=contract))
    with pytest.raises(PlatformError, match=f"'other' .* implements contract {contract!r}; this kvhal reads 1 and 0"):
        shop.registry().load("stub")


def test_an_adapter_must_bear_the_name_it_is_offered_under(shop: Shop) -> None:
    shop.install("liar", adapter("other"))
    with pytest.raises(PlatformError, match="calls itself 'other'"):
        shop.registry().load("stub")


def test_a_name_nobody_offers_lists_those_that_are() -> None:
    with pytest.raises(PlatformError, match="no installed distribution offers it; installed: none"):
        Registry(()).load("cuda")


@pytest.fixture
def process_registry(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """The registry of the process, read afresh before and after from the distributions of the shop."""
    monkeypatch.setattr(registry.Registry, "installed", classmethod(lambda cls: shop.registry()))
    registry.installed.cache_clear()
    registry.load.cache_clear()
    yield shop
    registry.installed.cache_clear()
    registry.load.cache_clear()


def test_the_process_keeps_one_adapter_and_imports_it_when_probed(process_registry: Shop) -> None:
    body = """
    def probe(self):
        from kvhal.detection.probe import Probe
        return Probe("stub", (), absent="a stub")
"""
    process_registry.install("good", adapter() + body)
    process_registry.install("broken", "raise ImportError('x')", name="broken")
    assert registry.names() == ("broken", "stub")
    found = registry.adapters()
    assert "good_adapter" not in sys.modules
    assert found["stub"].probe().absent == "a stub"
    assert registry.load("stub") is registry.load("stub")
    with pytest.raises(PlatformError, match="'broken'"):
        found["broken"].probe()


def test_choosing_opens_no_context() -> None:
    choose(HostFacts.read({}), "cpu", ALL)
    assert not context_is_open()
