"""The GPU that benchmarks and checks run on."""

import os
import subprocess
import sys
from typing import Any


def the_gpu() -> dict[str, Any]:
    """Name, driver and memory in bytes, without a context. `shared`: whether several processes may use it."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    fields = "name,driver_version,memory.total,memory.free,compute_mode"
    command = ["nvidia-smi", "-i", index, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        name, driver, total, free, mode = (part.strip() for part in said.splitlines()[0].split(","))
        memory = {"total": int(total) * 2**20, "free": int(free) * 2**20}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        print(f"nvidia-smi does not say what GPU this is ({error}): engines run one at a time")
        # In a short process, because it takes memory on the GPU.
        ask = "import torch; print(torch.cuda.get_device_name(), *torch.cuda.mem_get_info(), sep='|')"
        said = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
        name, free, total = said.strip().split("|")
        return {"name": name, "driver": "unknown", "total": int(total), "free": int(free), "shared": False}
    return {"name": name, "driver": driver, **memory, "shared": mode == "Default"}
