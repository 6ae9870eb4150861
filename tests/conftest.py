"""Shared by all tests: one thread per process, since pico models are several times slower with two; and Ctrl-C works.

A shell that starts the tests in the background lets them, and all they start, ignore SIGINT. Tests of what Ctrl-C does
need it back.
"""

import contextlib
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)
