"""Shared by all tests: one thread per process, since pico models are several times slower with two; and signals work.

A shell that starts the tests in the background lets them, and all they start, ignore SIGINT, and nohup SIGHUP. Tests of
what these signals do need them back.
"""

import contextlib
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(number, handler)
