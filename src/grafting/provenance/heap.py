"""Memory that is freed and soon asked for again."""

from __future__ import annotations

import ctypes
import sys


def keep_heap() -> None:
    """Stop glibc from giving memory back to the kernel between steps.

    With its defaults every activation is mapped and unmapped again, which cost up to three quarters of the
    time of a small model's training here, and a fifth of a merge's. Blocks over 32 MiB (large models) are still
    mapped one by one.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_mmap_threshold, m_trim_threshold, m_top_pad = -3, -1, -2
        libc.mallopt(m_mmap_threshold, 32 << 20)
        libc.mallopt(m_trim_threshold, 1 << 30)
        libc.mallopt(m_top_pad, 64 << 20)
