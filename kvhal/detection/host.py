"""What this machine says about itself before any device is opened: the one probe interface of detection, injectable.

`HostFacts.read` starts no GPU runtime: it reads torch's build, a few environment variables, device nodes and the two
management libraries where they are installed. Each source is a witness with a typed answer; none of them decides.
The names of vendors' nodes and libraries live here and in `registry`, and nowhere else in the core.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from kvhal.errors import PlatformError

__all__ = ["ENV_NAMES", "WITNESSES", "Absent", "Failed", "HostFacts", "Present", "Witness"]

# The environment is narrowed to these, so that printing the facts never prints a secret.
ENV_NAMES = (
    "KVHAL_PLATFORM",
    "KVHAL_MASQUERADE",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION",
)
TOOLKITS = ("toolkit_cuda", "toolkit_rocm")
WITNESSES = ("nvml", "nvidia_node", "amdsmi", "kfd", "dxg", *TOOLKITS)


@dataclass(frozen=True, slots=True)
class Present:
    """The source is here and answers."""

    detail: str

    def __str__(self) -> str:
        return f"present: {self.detail}"


@dataclass(frozen=True, slots=True)
class Absent:
    """The source is not on this machine."""

    reason: str

    def __str__(self) -> str:
        return f"absent: {self.reason}"


@dataclass(frozen=True, slots=True)
class Failed:
    """The source is here and could not answer."""

    reason: str

    def __str__(self) -> str:
        return f"failed: {self.reason}"


Witness = Present | Absent | Failed


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts detection rests on. Build one by hand to ask about a machine that is not here.

    torch_cuda, torch_hip: `torch.version.cuda` and `.hip`, None where the build has none. witnesses: an answer for
    every name of WITNESSES; those left out read as Absent, a name that is not a witness raises ValueError.
    """

    torch_version: str
    torch_cuda: str | None = None
    torch_hip: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    machine: str = "x86_64"
    witnesses: Mapping[str, Witness] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.witnesses) - set(WITNESSES)
        if unknown:
            raise ValueError(f"witnesses {sorted(unknown)!r} are unknown; known: {', '.join(WITNESSES)}")
        total = {name: self.witnesses.get(name, Absent("not asked")) for name in WITNESSES}
        object.__setattr__(self, "witnesses", total)

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None, root: Path = Path("/")) -> HostFacts:
        """The facts of this machine. Raises PlatformError if torch itself cannot be imported."""
        environ = os.environ if env is None else env
        version, cuda, hip = _torch_build()
        return cls(
            torch_version=version,
            torch_cuda=cuda,
            torch_hip=hip,
            env={name: environ[name] for name in ENV_NAMES if name in environ},
            machine=platform.machine(),
            witnesses={
                "nvml": _library("pynvml", _ask_nvml),
                "nvidia_node": _nvidia_node(root),
                "amdsmi": _library("amdsmi", _ask_amdsmi),
                "kfd": _node(root, "/dev/kfd"),
                "dxg": _node(root, "/dev/dxg"),
                "toolkit_cuda": _toolkit(root, "nvcc", "usr/local/cuda", environ),
                "toolkit_rocm": _toolkit(root, "hipcc", "opt/rocm", environ),
            },
        )

    def found(self) -> tuple[str, ...]:
        """What was found, one line a source, for messages and reports."""
        build = f"torch {self.torch_version}: CUDA {self.torch_cuda or 'none'}, HIP {self.torch_hip or 'none'}"
        notes = {name: " (toolkit files never count)" if name in TOOLKITS else "" for name in WITNESSES}
        return (build, *(f"{name} {self.witnesses[name]}{notes[name]}" for name in WITNESSES))


def _torch_build() -> tuple[str, str | None, str | None]:
    try:
        version = importlib.import_module("torch.version")
    except (ImportError, OSError, KeyError) as exc:
        # KeyError('libamd_smi.so'): a torch for ROCm imports amdsmi, and that wheel raises it without its library.
        raise PlatformError(
            f"torch was asked for its build and cannot be imported: {type(exc).__name__}: {exc}; "
            "mend the torch installation (an amdsmi wheel without its library breaks it: uninstall that)"
        ) from exc
    return version.__version__, version.cuda, version.hip


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Swallow what a foreign import prints and warns: amdsmi writes to stdout, which belongs to `--json`."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _library(name: str, ask: Callable[[ModuleType], Witness]) -> Witness:
    if find_spec(name) is None:
        return Absent(f"the Python package {name} is not installed")
    try:
        with _quiet():
            return ask(importlib.import_module(name))
    except (ImportError, KeyError) as exc:
        return Absent(f"{name} is installed and its driver library is not here: {type(exc).__name__}: {exc}")
    except Exception as exc:  # noqa: BLE001 - a foreign library may raise anything; its text becomes the answer
        if type(exc).__name__ in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"):
            return Absent(f"{name} is installed and no driver is loaded: {exc}")
        return Failed(f"{name} could not answer: {type(exc).__name__}: {exc}")


def _ask_nvml(pynvml: ModuleType) -> Witness:
    pynvml.nvmlInit()
    try:
        count = int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
    return Present(f"NVML lists {count} device(s)") if count else Absent("NVML lists no device")


def _ask_amdsmi(amdsmi: ModuleType) -> Witness:
    amdsmi.amdsmi_init()
    try:
        count = len(amdsmi.amdsmi_get_processor_handles())
    finally:
        amdsmi.amdsmi_shut_down()
    return Present(f"amdsmi lists {count} device(s)") if count else Absent("amdsmi lists no device")


def _node(root: Path, path: str) -> Witness:
    """A device node, asked by permission only: opening /dev/kfd would already register this process with the driver."""
    node = root / path.lstrip("/")
    if not node.exists():
        return Absent(f"{path} does not exist")
    if not os.access(node, os.R_OK | os.W_OK):
        return Failed(
            f"{path} exists and this user has no permission to read and write it; join the group that owns it"
        )
    return Present(f"{path} is readable and writable")


def _nvidia_node(root: Path) -> Witness:
    first = next(iter(sorted((root / "dev").glob("nvidia[0-9]*"))), root / "dev/nvidiactl")
    return _node(root, f"/dev/{first.name}")


def _toolkit(root: Path, compiler: str, folder: str, env: Mapping[str, str]) -> Witness:
    on_path = shutil.which(compiler, path=env.get("PATH", ""))
    places = [p for p in (root / folder, *sorted((root / folder).parent.glob(f"{Path(folder).name}-*"))) if p.is_dir()]
    if on_path or places:
        return Present(on_path or str(places[0]))
    return Absent(f"no {compiler} on PATH and no /{folder}")
