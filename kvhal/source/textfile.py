"""Reading a small text file that somebody named: everything that can be wrong with it is a ConfigError."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvhal.errors import ConfigError, Problem

__all__ = ["MAX_BYTES", "read_text"]

MAX_BYTES = 1 << 20


def read_text(path: Path, name: str) -> str:
    """The text of a regular UTF-8 file of at most MAX_BYTES; a larger one is refused from its size, unread."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            kind = "a directory" if stat.S_ISDIR(found.st_mode) else "not a regular file"
            raise ConfigError(Problem(f"asked to read a file, found {kind}", name, hint="name a file"))
        if found.st_size > MAX_BYTES:
            message = f"the file has {found.st_size} bytes; at most {MAX_BYTES} are read"
            raise ConfigError(Problem(message, name, hint="is this the right file?"))
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        near = path.parent if path.parent.is_dir() else None
        hint = f"the directory {str(near)!r} has no {path.name!r}" if near else f"there is no {str(path.parent)!r}"
        raise ConfigError(Problem("the file does not exist", name, hint=hint)) from None
    except (OSError, ValueError) as exc:
        reason = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno else str(exc)
        raise ConfigError(Problem(f"the file cannot be read: {reason}", name)) from exc
    return _decode(raw, name)


def _decode(raw: bytes, name: str) -> str:
    if len(raw) > MAX_BYTES:
        raise ConfigError(Problem(f"the file grew beyond {MAX_BYTES} bytes while it was read", name))
    if (at := raw.find(0)) >= 0:
        message = f"the file is binary: byte {at} is NUL"
        raise ConfigError(Problem(message, name, hint="save it as UTF-8 text"))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        column = exc.start - raw.rfind(b"\n", 0, exc.start)
        message = f"the file is not UTF-8: byte 0x{raw[exc.start]:02x}"
        raise ConfigError(Problem(message, f"{name}:{line}:{column}", hint="save it as UTF-8 text")) from None
