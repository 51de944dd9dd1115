"""The interpreter must be chosen before triton is imported, so those checks run in a child process only."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
