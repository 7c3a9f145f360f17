"""The tests. Without a GPU the Triton kernels are interpreted, which Triton has to know when it is first imported."""

import os
from pathlib import Path

GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")

if not any(Path(device).exists() for device in GPU_DEVICES):
    os.environ["TRITON_INTERPRET"] = "1"
