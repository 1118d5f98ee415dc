"""Full attention: keeps everything. Without a tier it is stock vLLM, the baseline of comparisons.

With `evict: host` a request keeps its budget on the device and its other blocks on the host: prompts read all of them,
and each layer of a decode reads those that its query wants (`compute.reach`).
"""

from typing import ClassVar

import numpy as np

from ..config.fields import FETCH, KEEPING, READ, READ_PROMPTS
from ..config.options import Option
from .base import Blocks, Policy

#: Fields of a request whose blocks wait on the host; its sinks and recent tokens are read without a host, too.
TIERED = ("when", "admit", "budget", "buffer", "sink", "recent", "exact", "evict", "host")


class Full(Policy):
    name = "full"
    declares: ClassVar[tuple[Option, ...]] = (
        *(option for option in KEEPING if option.name in TIERED),
        *READ,
        FETCH,
        READ_PROMPTS,
    )

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks.index
