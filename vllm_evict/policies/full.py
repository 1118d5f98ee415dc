"""Full attention: keeps everything, as stock vLLM does. The baseline of comparisons."""

from typing import ClassVar

import numpy as np

from ..config.fields import SELECT
from ..config.options import Option
from .base import Blocks, Policy


class Full(Policy):
    name = "full"
    declares: ClassVar[tuple[Option, ...]] = SELECT

    def importance(self, blocks: Blocks) -> np.ndarray:
        return np.full(len(blocks.index), np.inf)
