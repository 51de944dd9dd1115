"""What the CPU adapter says of memory: real files of every cgroup shape, and this process's own figures."""

from __future__ import annotations

import gc
import platform
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvhal.detection.host import HostFacts
from kvhal.readings import Known, MemoryReading, Unknown
from kvhal_cpu.cgroup import limits
from kvhal_cpu.cpu_probe import machine_arch, probe_cpu
from kvhal_cpu.host_memory import HostMemory, read_memory, reset_peak, trim

MIB = 2**20
TOTAL = 64_000 * MIB
AVAILABLE = 48_000 * MIB


class Tree:
    """A file system root with a /proc and any control groups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal:  {TOTAL // 1024} kB\nMemAvailable:  {AVAILABLE // 1024} kB\n")
        self.write("proc/self/status", "Name:\tpython\nVmHWM:\t  3072 kB\nVmRSS:\t  2048 kB\nThreads:\t1\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, own: str, mount: str = "/sys/fs/cgroup", inside: str = "/") -> None:
        self.write("proc/self/cgroup", f"0::{own}\n")
        self.write("proc/self/mountinfo", f"30 20 0:26 {inside} {mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n")

    def v1(self, own: str, inside: str = "/") -> None:
        self.write("proc/self/cgroup", f"5:cpu,cpuacct:{own}\n4:memory:{own}\n1:name=systemd:/\n0::/\n")
        self.write(
            "proc/self/mountinfo",
            f"32 31 0:29 {inside} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            f"35 31 0:32 {inside} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        )

    def group2(self, path: str, maximum: str, current: int = 0, inactive: int = 0, high: str = "max") -> None:
        base = f"sys/fs/cgroup/{path}"
        self.write(f"{base}/memory.max", f"{maximum}\n")
        self.write(f"{base}/memory.high", f"{high}\n")
        self.write(f"{base}/memory.current", f"{current}\n")
        self.write(f"{base}/memory.stat", f"anon 1\ninactive_file {inactive}\nactive_file 7\n")

    def group1(self, path: str, limit: int, usage: int = 0, inactive: int = 0) -> None:
        base = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{base}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{base}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{base}/memory.stat", f"inactive_file 3\ntotal_inactive_file {inactive}\n")

    def read(self) -> MemoryReading:
        return HostMemory(self.root).read()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def figures(reading: MemoryReading) -> tuple[int, int]:
    assert isinstance(reading.total, Known)
    assert isinstance(reading.free, Known)
    return reading.total.value, reading.free.value


def test_without_groups_it_is_the_machine(tree: Tree) -> None:
    reading = tree.read()
    assert reading.total == Known(TOTAL, "/proc/meminfo MemTotal")
    assert reading.free == Known(AVAILABLE, "/proc/meminfo MemAvailable")
    assert reading.own == Known(2048 * 1024, "/proc/self/status VmRSS")
    assert reading.peak == Known(3072 * 1024, "/proc/self/status VmHWM")


def test_a_group_above_the_own_one_may_be_the_tightest(tree: Tree) -> None:
    tree.v2("/pod/container")
    tree.group2("pod/container", str(900 * MIB), current=100 * MIB, inactive=20 * MIB)
    tree.group2("pod", str(500 * MIB), current=450 * MIB, inactive=50 * MIB)
    reading = tree.read()
    assert reading.total == Known(500 * MIB, "/sys/fs/cgroup/pod/memory.max")
    assert reading.free == Known(100 * MIB, "/sys/fs/cgroup/pod/memory.max")


def test_total_and_free_may_come_from_different_groups(tree: Tree) -> None:
    tree.v2("/pod/container")
    tree.group2("pod/container", str(400 * MIB), current=10 * MIB)
    tree.group2("pod", str(500 * MIB), current=480 * MIB)
    assert figures(tree.read()) == (400 * MIB, 20 * MIB)


@pytest.mark.parametrize("text", ["max", "", "garbage", "-5", "1e9", "9223372036854771712"])
def test_no_limit_and_no_number_leave_the_machine(tree: Tree, text: str) -> None:
    tree.v2("/a")
    tree.group2("a", text, current=5 * MIB)
    assert figures(tree.read()) == (TOTAL, AVAILABLE)


def test_the_throttling_limit_counts(tree: Tree) -> None:
    tree.v2("/a")
    tree.group2("a", str(900 * MIB), high=str(700 * MIB))
    assert tree.read().total == Known(700 * MIB, "/sys/fs/cgroup/a/memory.high")


def test_a_namespace_shows_the_own_group_as_the_root(tree: Tree) -> None:
    tree.v2("/")
    tree.group2("", str(300 * MIB), current=100 * MIB)
    assert figures(tree.read()) == (300 * MIB, 200 * MIB)


@pytest.mark.parametrize("own", ["/docker/abc", "/../../other", "/elsewhere"])
def test_a_mount_of_one_group_is_read_at_the_mount_point(tree: Tree, own: str) -> None:
    tree.v2(own, inside="/docker/abc")
    tree.group2("", str(300 * MIB))
    assert figures(tree.read()) == (300 * MIB, 300 * MIB)


def test_a_group_outside_the_namespace_is_read_at_its_root(tree: Tree) -> None:
    tree.v2("/../other")
    tree.group2("", str(300 * MIB))
    tree.group2("../other", str(200 * MIB))
    assert figures(tree.read()) == (300 * MIB, 300 * MIB)


def test_version_1_is_read_beside_an_empty_version_2(tree: Tree) -> None:
    tree.v1("/docker/abc")
    tree.group1("docker/abc", 600 * MIB, usage=200 * MIB, inactive=150 * MIB)
    tree.group1("docker", 2**63 - 4096)
    tree.group1("", 2**63 - 4096)
    reading = tree.read()
    assert reading.total == Known(600 * MIB, "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes")
    assert figures(reading)[1] == 550 * MIB
    assert len(limits(tree.root)) == 1


def test_version_1_in_a_container_without_a_namespace(tree: Tree) -> None:
    tree.v1("/docker/abc", inside="/docker/abc")
    tree.group1("", 600 * MIB, usage=700 * MIB)
    assert figures(tree.read()) == (600 * MIB, 0)


@pytest.mark.parametrize("missing", ["memory.current", "memory.stat"])
def test_a_group_that_hides_its_usage_still_limits(tree: Tree, missing: str) -> None:
    tree.v2("/a")
    tree.group2("a", str(300 * MIB), current=100 * MIB, inactive=40 * MIB)
    (tree.root / "sys/fs/cgroup/a" / missing).unlink()
    assert figures(tree.read()) == (300 * MIB, (300 if missing == "memory.current" else 200) * MIB)


@pytest.mark.parametrize("text", ["garbage", "0::", "4:memory", "\x00\xff", "0::relative"])
def test_garbage_in_proc_is_no_limit(tree: Tree, text: str) -> None:
    tree.write("proc/self/cgroup", text)
    tree.write("proc/self/mountinfo", text)
    assert figures(tree.read()) == (TOTAL, AVAILABLE)


def test_without_proc_psutil_answers_and_the_peak_is_unknown(tmp_path: Path) -> None:
    reading = HostMemory(tmp_path).read()
    assert reading.total == Known(psutil.virtual_memory().total, "psutil total")
    assert isinstance(reading.own, Known)
    assert reading.own.value > MIB
    assert isinstance(reading.peak, Unknown)


def test_a_refused_reset_makes_the_peak_unknown_until_one_succeeds(tree: Tree) -> None:
    memory = HostMemory(tree.root)
    refused = tree.root / "proc/self/clear_refs"
    refused.mkdir()
    peak = memory.reset_peak()
    assert isinstance(peak, Unknown)
    assert "clear_refs" in peak.reason
    assert memory.read().peak == peak
    refused.rmdir()
    refused.touch()
    assert isinstance(memory.reset_peak(), Known)
    assert refused.read_text() == "5"
    assert isinstance(memory.read().peak, Known)


def test_the_peak_of_this_process_remembers_what_was_freed() -> None:
    size = 64 * MIB
    gc.collect()
    start = reset_peak()
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    held = read_memory()
    del block
    after = read_memory()
    figures_ = [start, held.own, after.own, after.peak]
    assert all(isinstance(f, Known) for f in figures_), figures_
    base, during, left, peak = (f.value for f in figures_ if isinstance(f, Known))
    # The kernel batches these counters per CPU, 32 pages at least on each, so 4 MiB are left as slack.
    assert during - base >= size - 4 * MIB
    assert during - left >= size - 4 * MIB
    assert peak >= during - 4 * MIB


def test_a_reading_costs_less_than_a_millisecond() -> None:
    read_memory()
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        read_memory()
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1e-3


def test_this_process_fits_in_its_own_reading() -> None:
    total, free = figures(read_memory())
    assert 0 < free <= total <= psutil.virtual_memory().total


def test_trim_may_be_called_at_any_time() -> None:
    trim()
    trim()


def test_trim_does_nothing_where_the_c_library_has_no_such_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    trim()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("kvhal_cpu.host_memory.ctypes.CDLL", lambda name: object())
    trim()


@pytest.mark.parametrize(
    ("machine", "arch"),
    [("x86_64", "x86_64"), ("AMD64", "x86_64"), ("arm64", "aarch64"), ("aarch64", "aarch64"), ("riscv64", "riscv64")],
)
def test_one_device_with_an_exact_arch(tree: Tree, machine: str, arch: str) -> None:
    tree.v2("/")
    tree.group2("", str(300 * MIB))
    tree.write("proc/cpuinfo", "processor\t: 0\nmodel name\t: An Example CPU @ 3 GHz\n\nprocessor\t: 1\n")
    probe = probe_cpu(HostFacts("2.13.0+cpu", machine=machine), tree.root)
    (device,) = probe.devices
    assert (device.platform, device.index, device.arch) == ("cpu", 0, arch)
    assert device.name == "An Example CPU @ 3 GHz"
    assert device.memory == Known(300 * MIB, "/sys/fs/cgroup/memory.max")
    assert machine_arch(machine) == arch


@pytest.mark.parametrize("cpuinfo", [None, "processor\t: 0\nCPU part\t: 0xd40\n"])
def test_a_cpu_without_a_model_name_still_has_a_name(tree: Tree, cpuinfo: str | None) -> None:
    if cpuinfo is not None:
        tree.write("proc/cpuinfo", cpuinfo)
    (device,) = probe_cpu(HostFacts("2.13.0+cpu", machine="aarch64"), tree.root).devices
    assert device.name == (platform.processor() or "aarch64")
