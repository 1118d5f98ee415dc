"""All parts of steps that a worker may need."""

from ...compute.step_parts import StepPart
from ...features.audit.worker import Scorer
from .filling import Filling
from .unread import Waiting

#: In the order in which they apply plans.
KINDS: tuple[type[StepPart], ...] = (Waiting, Filling, Scorer)
