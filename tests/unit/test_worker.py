"""A worker's step around the model's."""

from unittest.mock import Mock

import pytest

from vllm_evict.core.plan import EvictionPlan
from vllm_evict.integration.worker.worker import EvictionWorkerMixin


class Failing:
    def execute_model(self, scheduler_output):
        raise RuntimeError("out of memory")


class Worker(EvictionWorkerMixin, Failing):
    pass


def test_a_rank_whose_model_raises_waits_for_no_other_rank():
    worker = Worker()
    worker.kv_evict, worker._ranks = Mock(plan=EvictionPlan.empty(1)), Mock()
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.execute_model(None)
    worker.kv_evict.end.assert_not_called()
    worker.kv_evict.abandon.assert_called_once_with()
    worker._ranks.over_all.assert_not_called()
