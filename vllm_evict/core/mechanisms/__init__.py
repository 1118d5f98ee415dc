"""Mechanisms that decide on blocks (docs/design.md, "Mechanisms and actions")."""

from .base import Group, Mechanism, Metric, SchedulerView, Step
from .budget import Budget
from .pressure import Pressure
from .profiles import Profiles
from .prompts import WholePrompts
from .shared import SharedBudget
from .staging import Staging

__all__ = [
    "Budget",
    "Group",
    "Mechanism",
    "Metric",
    "Pressure",
    "Profiles",
    "SchedulerView",
    "SharedBudget",
    "Staging",
    "Step",
    "WholePrompts",
]  # fmt: skip
