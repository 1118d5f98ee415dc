"""Refusals by a GPU's attention backends and kernels, and what is taken in their place."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from test_refusals import H2O, UNMEASURED
from test_refusals_backends import plain_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.integration.start import advice, backends
from vllm_evict.integration.start.capabilities import environments, refuse, server


def on_gpu(monkeypatch, capability, **backends):
    """A GPU, and what vLLM says of its attention backends: name -> (why it is not taken, sizes of its kernels' blocks).

    Without a name vLLM takes the first that it takes at all.
    """

    def made(name, reasons, sizes):
        return SimpleNamespace(
            get_name=lambda: name,
            validate_configuration=lambda **_: reasons,
            get_supported_kernel_block_sizes=lambda: sizes,
            supports_sink=lambda: False,
        )

    classes = {name: made(name, *backend) for name, backend in backends.items()}
    platform = SimpleNamespace(
        is_rocm=lambda: False,
        is_cuda=lambda: True,
        get_device_capability=lambda: DeviceCapability(*capability),
        get_attn_backend_cls=lambda *_, **__: next(name for name, (reasons, _) in backends.items() if not reasons),
    )
    for module in (server, advice):
        monkeypatch.setattr(module, "current_platform", platform)
    enum = {name: SimpleNamespace(get_class=lambda made=made: made) for name, made in classes.items()}
    monkeypatch.setattr(advice, "AttentionBackendEnum", enum)
    monkeypatch.setattr(advice, "resolve_obj_by_qualname", classes.get)
    monkeypatch.setattr(advice, "set_current_vllm_config", lambda _: nullcontext())


MANY, FEW = [MultipleOf(16)], [16, 32, 64]
SPLITTING = {"name": "duo", "pattern": ["10"]}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("hd256", [False, True])
def test_a_hybrid_on_flashinfer_is_refused_on_older_releases_before_it_is_loaded(monkeypatch, named, hd256):
    """vLLM takes FlashInfer on Blackwell by itself. FlashAttention reads blocks of 128 alone there with heads of 256.

    Releases before 0.32 split the block tables of all layers.
    """
    on_gpu(
        monkeypatch, (10, 0), FLASHINFER=([], FEW), FLASH_ATTN=([], [128] if hd256 else MANY), TRITON_ATTN=([], MANY)
    )
    config = plain_config(device_config__device_type="cuda", model_config__is_hybrid=True)
    config.attention_config.backend = AttentionBackendEnum.FLASHINFER if named else None
    instead = "TRITON_ATTN" if hd256 else "FLASH_ATTN or TRITON_ATTN"
    refuse.check_config(config, KVPolicyConfig.parse(H2O))
    monkeypatch.setattr(environments.versions, "splits_in_builders", lambda: False)
    with pytest.raises(
        KVPolicyError, match=f"Mamba, .* and the attention backend FLASHINFER.*: set --attention-backend to {instead}$"
    ):
        refuse.check_config(config, KVPolicyConfig.parse(H2O))
    config.attention_config.backend = AttentionBackendEnum.TRITON_ATTN
    refuse.check_config(config, KVPolicyConfig.parse(H2O))


def test_layers_do_not_reach_blocks_that_kernels_split(monkeypatch):
    """vLLM takes FlashInfer on Blackwell by itself."""
    on_gpu(monkeypatch, (10, 0), FLASHINFER=([], FEW), FLASH_ATTN=([], MANY), TRITON_ATTN=([], MANY))
    config = plain_config(device_config__device_type="cuda")
    policy = KVPolicyConfig.parse({"name": "full", "evict": "host", "host": 1 << 30})
    refuse.check_config(config, policy)
    config.model_config.is_hybrid = True
    with pytest.raises(KVPolicyError, match="FLASHINFER beside states, .*: set .* to FLASH_ATTN or TRITON_ATTN"):
        refuse.check_config(config, policy)


def test_what_vllm_would_choose_is_refused_with_what_runs_on_the_gpu(monkeypatch):
    config, h2o = plain_config(device_config__device_type="cuda"), KVPolicyConfig.parse(H2O)
    why = ["compute capability not supported"]
    latent = {
        "FLASHINFER_MLA": (why, [64]),
        "FLASHMLA": (why, [64]),
        "FLASH_ATTN_MLA": (why, MANY),
        "TRITON_MLA": ([], MANY),
    }
    on_gpu(monkeypatch, (10, 0), CUTLASS_MLA=([], [128]), **latent)
    config.model_config.use_mla = True
    with pytest.raises(
        KVPolicyError,
        match="CUTLASS_MLA: set .* on which policies run: CPU_MLA and AMX_MLA, and on a GPU TRITON_MLA, or leave",
    ):
        refuse.check_config(config, h2o)
    on_gpu(monkeypatch, (10, 0), FLASHINFER=([], FEW), FLASH_ATTN=(why, MANY), TRITON_ATTN=([], MANY))
    config.model_config.use_mla = False
    with pytest.raises(
        KVPolicyError,
        match="FLASHINFER, .* plans .* set --attention-backend to TRITON_ATTN, or use a policy for whole layers",
    ):
        refuse.check_config(config, KVPolicyConfig.parse(SPLITTING))
    refuse.check_config(config, h2o)
    on_gpu(monkeypatch, (10, 0), FLASHINFER=([], FEW), FLASH_ATTN=(why, MANY), TRITON_ATTN=(why, MANY))
    with pytest.raises(
        KVPolicyError,
        match="set --attention-backend to another one, .* none: leave --kv-policy out$",
    ):
        refuse.check_config(config, KVPolicyConfig.parse(SPLITTING))


def test_a_served_backend_takes_the_place_of_vllms_own_choice(monkeypatch):
    """A line tells. A backend that the user names stays, and so does vLLM's where no other one runs."""
    lines, why = [], ["compute capability not supported"]
    monkeypatch.setattr(backends.logger, "info", lambda words, *values: lines.append(words % values))
    splitting, h2o = KVPolicyConfig.parse(SPLITTING), KVPolicyConfig.parse(H2O)

    def chosen(policy, use_mla=False, named=None):
        config = plain_config(device_config__device_type="cuda", attention_config__backend=named)
        config.model_config.use_mla = use_mla
        backends.choose(config, policy)
        found, lines[:] = list(lines), []
        return config.attention_config.backend_per_kind, found, config

    on_gpu(monkeypatch, (10, 0), FLASHINFER=([], FEW), FLASH_ATTN=(why, MANY), TRITON_ATTN=([], MANY))
    assert chosen(h2o)[:2] == ({}, [])
    taken, (line,), config = chosen(splitting)
    assert taken == {"full_attention": AttentionBackendEnum.TRITON_ATTN}
    assert line.startswith("KV policy duo: attention backend TRITON_ATTN in place of vLLM's choice, FLASHINFER: ")
    refuse.check_config(config, splitting)
    assert chosen(splitting, named=AttentionBackendEnum.FLASHINFER)[:2] == ({}, [])
    on_gpu(monkeypatch, (10, 0), FLASHINFER=([], FEW), FLASH_ATTN=(why, MANY), TRITON_ATTN=(why, MANY))
    assert chosen(splitting)[:2] == ({}, [])
    latent = dict.fromkeys(("FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA"), (why, MANY))
    on_gpu(monkeypatch, (10, 0), CUTLASS_MLA=([], [128]), TRITON_MLA=([], MANY), **latent)
    assert chosen(h2o, use_mla=True)[0] == {"mla_attention": AttentionBackendEnum.TRITON_MLA}


@pytest.mark.parametrize("size, served", [(8, False), (16, True), (512, True), (528, False)])
def test_sizes_of_heads_that_kernels_cannot_read_are_refused_before_anything_is_loaded(size, served):
    config = plain_config(device_config__device_type="cuda", model_config__get_head_size=lambda: size)
    gemma4 = plain_config(device_config__device_type="cuda", model_config__get_head_size=lambda: min(size, 64))
    gemma4.model_config.hf_text_config = SimpleNamespace(head_dim=64, global_head_dim=size)
    for each in (config, gemma4):
        with nullcontext() if served else pytest.raises(KVPolicyError, match=f"heads of {size} dim.*16 to 512.*sink-w"):
            refuse.check_config(each, KVPolicyConfig.parse(H2O))
        refuse.check_config(each, KVPolicyConfig.parse(UNMEASURED))
    config.device_config.device_type = "cpu"
    refuse.check_config(config, KVPolicyConfig.parse(H2O))


def test_fp8_is_no_advice_where_it_does_not_run(monkeypatch):
    config = plain_config(device_config__device_type="cuda", cache_config__cache_dtype="fp8_e5m2")
    for capability, instead in (
        ((8, 0), "auto, or use a policy"),
        ((8, 9), r"auto or fp8 \(fp8_e4m3\), or use a policy"),
    ):
        on_gpu(monkeypatch, capability)
        with pytest.raises(KVPolicyError, match=f"'fp8_e5m2'.*: use --kv-cache-dtype {instead}"):
            refuse.check_config(config, KVPolicyConfig.parse(H2O))


@pytest.mark.parametrize("capability, served", [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_kernels_read_fp8_from_ada_on(monkeypatch, capability, served):
    """Triton compiles no kernel with fp8 for Ampere. Under policies without scores only vLLM's kernels read the cache."""
    platform = SimpleNamespace(is_rocm=lambda: False, get_device_capability=lambda: DeviceCapability(*capability))
    monkeypatch.setattr(server, "current_platform", platform)
    config = plain_config(device_config__device_type="cuda", cache_config__cache_dtype="fp8")
    for policy in (H2O, {"name": "duo", "pattern": ["10"]}):
        with nullcontext() if served else pytest.raises(KVPolicyError, match=r"'fp8' on a GPU of .* 8\.0, .* 8\.9"):
            refuse.check_config(config, KVPolicyConfig.parse(policy))
    refuse.check_config(config, KVPolicyConfig.parse(UNMEASURED))


@pytest.mark.parametrize(
    "policy, served", [(H2O, False), ({"name": "duo", "pattern": ["10"]}, False), (UNMEASURED, True)]
)
def test_kernels_are_for_ampere_and_newer(monkeypatch, policy, served):
    platform = SimpleNamespace(is_rocm=lambda: False, get_device_capability=lambda: DeviceCapability(7, 5))
    monkeypatch.setattr(server, "current_platform", platform)
    config = plain_config(device_config__device_type="cuda")
    with nullcontext() if served else pytest.raises(KVPolicyError, match=r"a GPU of compute capability 7\.5, .* 8\.0"):
        refuse.check_config(config, KVPolicyConfig.parse(policy))
