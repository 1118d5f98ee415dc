"""Full attention: keep everything. Stock vLLM, and the baseline of every comparison."""

from typing import ClassVar

import numpy as np

from ..config.options import Option
from .base import Blocks, Policy


class Full(Policy):
    name = "full"
    declares: ClassVar[tuple[Option, ...]] = ()

    def importance(self, blocks: Blocks) -> np.ndarray:
        return np.full(len(blocks.index), np.inf)
