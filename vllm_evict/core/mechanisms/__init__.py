"""Mechanisms: each is one way in which requests lose blocks, get them back, or have keys rotated."""

from .base import Group, Mechanism, SchedulerView, Step
from .budget import Budget
from .context import Context
from .offload import Offload
from .pressure import Pressure
from .profiles import Profiles
from .prompts import WholePrompts
from .reach import Reach
from .recall import Again, Recall
from .shared import SharedBudget

__all__ = [
    "Again", "Budget", "Context", "Group", "Mechanism", "Offload", "Pressure", "Profiles", "Reach", "Recall",
    "SchedulerView", "SharedBudget", "Step", "WholePrompts",
]  # fmt: skip
