"""Settings of processes that run tests or parts of them. Import this before vLLM."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parents[1]
#: Folders whose modules tests import: the harness, then the lanes.
FOLDERS = [str(TESTS / "harness"), *sorted(str(path) for path in TESTS.iterdir() if [*path.glob("test_*.py")])]
RUNNER = os.environ.get("VLLM_EVICT_TEST_RUNNER", "v1")

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Tiny models gain nothing from threads, and lose a lot where OpenMP's threads wait for each other on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Numba, with which vLLM proposes n-grams, gives torch as many threads as the machine has cores.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
# It compiles that search for longer than the tests take, and reads this at its import.
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")
# Where a process has several all the same, those that wait give their core up.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# vLLM's sampler compiles how it ranks log-probabilities: ten seconds in each process that asks for some.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# A server whose machine stands still for five seconds closes connections on which requests wait; clients here ask once.
os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "600")
sys.path += [folder for folder in FOLDERS if folder not in sys.path]


def prepare():
    """Set up Triton's interpreter and torchvision, which image processors of transformers and vLLM's Qwen-VL need.

    pip's torchvision is built for CUDA, and its operators can't be loaded here. Processors of images resize with
    torch's; only the registration of shapes of torchvision's own operators wants these to be there.
    """
    # Where scripts/setup.sh puts it. It has to come before transformers and vLLM are imported.
    sys.path.append(str(Path(sys.prefix) / "vision"))
    if find_spec("torchvision") is not None:
        name = "torchvision._meta_registrations"
        sys.modules.setdefault(name, ModuleType(name))
    import interpreter
    import torch

    if not torch.cuda.is_available():
        interpreter.use_interpreter()
    if RUNNER == "v2":
        interpreter.use_model_runner_v2()
    elif RUNNER == "v1-triton":
        interpreter.use_model_runner_v1()
