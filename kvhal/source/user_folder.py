"""Where kvhal keeps what belongs to the user: evidence and tuning of their own machines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["user_folder"]


def user_folder(env: Mapping[str, str] = os.environ) -> Path:
    """`kvhal` in XDG_CONFIG_HOME, else in ~/.config. It need not exist."""
    # The XDG base directory specification: a relative path there is to be ignored.
    base = env.get("XDG_CONFIG_HOME", "")
    home = Path(base) if Path(base).is_absolute() else Path(env.get("HOME", "~")).expanduser() / ".config"
    return home / "kvhal"
