"""What control groups leave to this process: every memory limit on the way from its own group up to the root.

A container is rarely limited by the group it can see first: a pod, a slice or a batch job above it may be tighter, so
each level counts. Both versions are read, since hybrid hosts mount both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["Limit", "limits"]


# v1 has no word for "no limit": it shows the largest page count a signed long can hold, in bytes.
UNLIMITED = 2**62
# proc(5), mountinfo: fields 4 and 5 are the root and the mount point; type, source and options follow the dash.
MOUNT_FIELDS = 5
TYPE_FIELDS = 3


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit in bytes, what its group uses of it without reclaimable file cache, and the file it stands in."""

    limit: int
    used: int
    source: str

    @property
    def free(self) -> int:
        return max(self.limit - self.used, 0)


@dataclass(frozen=True, slots=True)
class _Files:
    """The names one version gives its files. v2's high counts: beyond it a process is throttled to a standstill."""

    limits: tuple[str, ...]
    usage: str
    inactive: str


_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


def limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """Every limit that is set. Missing or unreadable files are no limit: the kernel has then none to enforce."""
    found = []
    for files, folder, name in _levels(root):
        values = [(f, n) for f in files.limits if (n := _number(folder / f)) is not None and n < UNLIMITED]
        if values:
            used = _used(files, folder)
            found += [Limit(n, used, f"{name}/{f}") for f, n in values]
    return tuple(found)


def _levels(root: Path) -> Iterator[tuple[_Files, Path, str]]:
    """Each group from this process's own up to the root of its hierarchy: file names, folder, name for people."""
    own = _own_groups(root)
    for files, inside, mount in _mounts(root):
        if files not in own:
            continue
        path = PurePosixPath(own[files])
        # Without a cgroup namespace the path is the host's, and the mount shows only what lies below `inside`.
        below = path.relative_to(inside) if path.is_relative_to(inside) else PurePosixPath()
        if ".." in below.parts:
            below = PurePosixPath()
        for level in (below, *below.parents):
            folder = mount / level
            yield files, root / str(folder).lstrip("/"), str(folder)


def _own_groups(root: Path) -> dict[_Files, str]:
    """The path of this process in the memory hierarchy of each version, from lines such as `4:memory:/pod/a`."""
    groups: dict[_Files, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not path.startswith("/"):
            continue
        if controllers == "":
            groups[_V2] = path
        elif "memory" in controllers.split(","):
            groups[_V1] = path
    return groups


@functools.lru_cache(maxsize=8)
def _mounts(root: Path) -> tuple[tuple[_Files, PurePosixPath, PurePosixPath], ...]:
    """The memory hierarchies that are mounted: file names, the group shown at the mount point, the mount point.

    Read once: a busy node has thousands of mounts, and those of a hierarchy do not move under a running process.
    """
    found = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        head, _, tail = line.partition(" - ")
        mount, kind = head.split(), tail.split()
        if len(mount) < MOUNT_FIELDS or len(kind) < TYPE_FIELDS:
            continue
        inside, point = PurePosixPath(mount[3]), PurePosixPath(mount[4])
        if kind[0] == "cgroup2":
            found.append((_V2, inside, point))
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            found.append((_V1, inside, point))
    return tuple(found)


def _used(files: _Files, folder: Path) -> int:
    usage = _number(folder / files.usage) or 0
    for line in _text(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == files.inactive and value.strip().isdecimal():
            return max(usage - int(value), 0)
    return usage


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
