"""Everything of vLLM that vllm_evict relies on, and why.

Each entry names one thing of vLLM as we would import it. What it asks for has to hold in every release that
vllm_evict.integration.versions lists: tests/test_compat.py checks it in the installed one and in the snapshots of all.
In code that is asked for, `...` stands for anything (see `source`).
"""

from .attention import ATTENTION, SPLIT_LAYERS
from .blocks import BLOCKS
from .devices import FLASH, FLASHINFER, TRITON
from .front import ARGUMENTS, CONFIGURATION, ENTRY_POINTS, FRONT_END
from .graphs import GRAPHS
from .loading import LOADING, POSITIONS
from .scheduler import SCHEDULER
from .touch import Touch
from .workers import RUNNERS, WORKERS

__all__ = ["NO_TOUCH", "TOUCHES", "Touch"]

#: Strings in vllm_evict that look like modules of vLLM and are none.
NO_TOUCH = {"vllm.evict": "name of the scheduler's logger"}

TOUCHES = [
    *ENTRY_POINTS,
    *ARGUMENTS,
    *CONFIGURATION,
    *FRONT_END,
    *SCHEDULER,
    *BLOCKS,
    *WORKERS,
    *RUNNERS,
    *SPLIT_LAYERS,
    *ATTENTION,
    *TRITON,
    *FLASH,
    *FLASHINFER,
    *GRAPHS,
    *LOADING,
    *POSITIONS,
]
