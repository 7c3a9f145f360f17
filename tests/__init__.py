"""The tests. Two libraries look at the environment when they are first imported, so it is set here.

What imports make stays: collecting garbage in between finds nothing, and takes a quarter of the time to begin.

Without a GPU the Triton kernels are interpreted. Threads that wait for others sleep: several test processes share the
cores, and one that spins takes the time of the one that it waits for.
"""

import gc
import os
import sys
from pathlib import Path

GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")

if not any(Path(device).exists() for device in GPU_DEVICES):
    os.environ["TRITON_INTERPRET"] = "1"
if "pytest" in sys.modules:
    gc.disable()  # until the tests are collected, see conftest.py
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
