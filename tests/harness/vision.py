"""torchvision for tests with images: image processors of transformers and vLLM's Qwen-VL need it."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

#: Where scripts/setup.sh puts torchvision.
FOLDER = Path(sys.prefix) / "vision"


def use_torchvision():
    """Make torchvision importable. This has to come before transformers and vLLM are imported.

    pip's torchvision is built for CUDA, and its operators can't be loaded here. Processors of images resize with
    torch's; only the registration of shapes of torchvision's own operators wants these to be there.
    """
    sys.path.append(str(FOLDER))
    if find_spec("torchvision") is not None:
        name = "torchvision._meta_registrations"
        sys.modules.setdefault(name, ModuleType(name))
