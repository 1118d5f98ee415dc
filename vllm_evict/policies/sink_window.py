"""StreamingLLM: keeps the first tokens (attention sinks) and a window of the most recent tokens."""

import numpy as np

from ..config.fields import KEEPING, READ
from ..config.options import having
from .base import Blocks, Policy


class SinkWindow(Policy):
    name = "sink-window"
    paper = "Xiao et al., Efficient Streaming Language Models with Attention Sinks, ICLR 2024, arXiv:2309.17453"
    window_is_the_budget = True
    declares = (*having(KEEPING, budget=None, buffer=0, recent=1024), *READ)

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks.index
