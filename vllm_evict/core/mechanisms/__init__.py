"""Mechanisms: each is one way in which requests lose blocks, move them, or have keys rotated."""

from .base import Group, Mechanism, SchedulerView, Step
from .budget import Budget
from .context import Context
from .pressure import Pressure
from .profiles import Profiles
from .prompts import WholePrompts
from .reach import Reach
from .shared import SharedBudget

__all__ = [
    "Budget", "Context", "Group", "Mechanism", "Pressure", "Profiles", "Reach", "SchedulerView", "SharedBudget",
    "Step", "WholePrompts",
]  # fmt: skip
