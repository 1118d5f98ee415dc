"""Models some of whose layers have sliding windows, behind vLLM's FlashInfer backend, without a GPU (flash_infer.py)."""

import pytest
import test_flashinfer
import test_full_graphs
import test_sliding_devices
from flash_infer import CAPABILITIES
from test_device_backends import on
from test_sliding_devices import check_decodes_are_replayed, check_evictions, check_full_is_stock

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
backend, server, replaying = test_flashinfer.backend, test_flashinfer.server, test_full_graphs.replaying
model = test_sliding_devices.model


@pytest.mark.parametrize("backend", [on("native")], indirect=True)
def test_full_is_stock(server, model):
    check_full_is_stock(server, model)


@pytest.mark.parametrize("backend", [on(kernels) for kernels in CAPABILITIES], indirect=True)
def test_evictions_and_logprobs_match_the_dense_oracle(server, backend, model):
    check_evictions(server, model, "h2o")


@pytest.mark.parametrize("backend", [on(kernels) for kernels in CAPABILITIES], indirect=True)
def test_every_decode_is_replayed_and_matches_the_dense_oracle(replaying, graphs, backend, model):
    check_decodes_are_replayed(replaying, graphs, model, "h2o", test_flashinfer.DECODES[backend.kernels])
