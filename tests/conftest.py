"""Shared by all tests: one thread per process, since pico models are several times slower with two."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
