"""Resident memory of one piece of work, for the benchmarks (Linux)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def peak_over_idle(run: Callable[[], object]) -> float:
    """MiB of resident memory that ``run`` adds at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # begin the high-water mark anew
    idle = _status_mib("VmRSS")
    run()
    return _status_mib("VmHWM") - idle


def peak_of_script(words: Sequence[str]) -> float:
    """Runs a Python script that prints such a figure, in a process of its own.

    There glibc gives every large buffer back when it is freed; else it keeps some, by chance, and the peak
    differs by tens of MiB with the order of small allocations.
    """
    exact = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True, env=exact)
    return float(done.stdout)


def _status_mib(name: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024
