"""Multi-head latent attention (MLA) behind views: tiny DeepSeek-like models against transformers under explicit masks."""

from functools import partial

import numpy as np
import pytest
import test_reach
import test_read
import torch
from engine import assert_like_stock, logprobs_of, random_prompt, random_requests
from interpreter import in_place_of, use_kernels
from latent import MODELS, DenseAbsorbed, keep_what_is_asked, make_latent, reference_mla, stand_in, take_large_tiles
from vllm.triton_utils import HAS_TRITON

from vllm_evict.compute import sums
from vllm_evict.compute.attention.latent_device import DeviceLatentOps
from vllm_evict.config import KVPolicyError
from vllm_evict.features.audit.engine import Audits

BLOCK = 16
SIZES = {"budget": 96, "sink": 16, "recent": 16, "buffer": 16}
H2O = {"name": "h2o", **SIZES}
#: Policies that the requests of one batch run under.
POLICIES = (
    *("sink-window", "strided", "random", "keydiff", "knorm", "pagedeviction"),
    *("h2o", "tova", "snapkv", "rkv", "scissorhands", "keybound"),
)
pytestmark = pytest.mark.since("0.32", "its FLASH_ATTN_MLA can't be imported without CUDA", kind="FLASH_ATTN_MLA")


@pytest.fixture(autouse=True)
def rotation():
    with reference_mla():
        yield


@pytest.fixture(scope="module")
def truths(tmp_path_factory):
    """Architecture -> directory, and transformers' model."""
    made = {}

    def make(architecture="DeepseekV3ForCausalLM"):
        if architecture not in made:
            folder = tmp_path_factory.mktemp("models") / architecture
            made[architecture] = folder, make_latent(folder, architecture)
        return made[architecture]

    return make


@pytest.fixture
def chunks(monkeypatch):
    keep_what_is_asked(monkeypatch)


@torch.no_grad()
def expected(model, prompt, output, trace, size=BLOCK):
    """Log-probabilities of a request's tokens by transformers, where queries see no block that was evicted before."""
    ids, tokens = [*prompt, *output.outputs[0].token_ids][:-1], output.outputs[0].token_ids
    seen, first = torch.ones(len(ids), len(ids), dtype=torch.bool).tril(), 0
    for count, evicted in zip(trace.steps, trace.evicted):
        first += count
        for block in evicted:
            seen[first:, block * size : (block + 1) * size] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    logits = model(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0, len(prompt) - 1 :]
    return torch.log_softmax(logits.double(), -1)[range(len(tokens)), tokens].numpy()


@torch.no_grad()
def test_audits_of_latents_measure_the_attention_that_transformers_pay(engine, truths, monkeypatch):
    """The share that the answer's queries pay to blocks that were gone at its end."""
    found, (folder, model) = [], truths()
    monkeypatch.setattr(Audits, "judge", lambda self, answer, verdict, computed, missed: found.append(missed))
    server = engine({**H2O, "audit": 1.0}, model=folder)
    ((prompt, output, trace),) = server.answered([(random_prompt(150), {"max_tokens": 12})])
    while server.scheduler.has_requests():
        server.llm.llm_engine.step()
    ids, gone = [*prompt, *output.outputs[0].token_ids][:-1], torch.tensor(sorted(sum(trace.evicted, [])))
    model.set_attn_implementation("eager")
    attentions = model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    paid = torch.cat(attentions)[:, :, len(prompt) - 1 :].double()
    lost = torch.isin(torch.arange(len(ids)) // BLOCK, gone)
    np.testing.assert_allclose(found, [float(paid[..., lost].sum() / paid.sum())], atol=1e-5)
    assert 0 < found[0] < 1
    server.assert_nothing_left()


def check_all_policies(server, model, shortest, max_tokens, noise, matters):
    """Requests under all policies in one batch, decoded past several decisions."""
    prompts, size = (
        [random_prompt(shortest + 10 * number, number) for number in range(len(POLICIES))],
        server.manager.block_size,
    )
    asked = [{"max_tokens": max_tokens, "logprobs": 0, "extra_args": {"kv_policy": policy}} for policy in POLICIES]
    moved = 0
    for policy, (prompt, output, trace) in zip(POLICIES, server.answered(list(zip(prompts, asked)))):
        assert sum(map(len, trace.evicted)) > 3 and trace.held[-2] <= 8, policy
        want = expected(model, prompt, output, trace, size)
        np.testing.assert_allclose(logprobs_of(output), want, atol=noise, err_msg=policy)
        trace.evicted = [[] for _ in trace.evicted]
        moved = max(moved, abs(logprobs_of(output) - expected(model, prompt, output, trace, size)).max())
    assert moved > matters, "what was evicted does not matter to this model"
    server.assert_nothing_left()


@pytest.mark.oracle("latents")
@pytest.mark.both_runners("DeepseekV3ForCausalLM")
@pytest.mark.parametrize("architecture", MODELS)
def test_logprobs_after_evictions_are_those_of_transformers(engine, truths, architecture):
    folder, model = truths(architecture)
    server = engine({**H2O, "allow": [*POLICIES]}, model=folder)
    assert type(server.manager.kv_cache_spec).__name__ == "EvictableLatentSpec" and server.manager.block_size == BLOCK
    check_all_policies(server, model, 130, 40, 3e-5, 0.1)


def test_chunks_of_a_prompt_see_what_is_left_and_later_requests_hit_pure_blocks(engine, truths, chunks):
    """Blocks go while a prompt is computed, so that its next chunk reads a context with holes, beside decodes."""
    folder, model = truths()
    server = engine(H2O, model=folder, max_num_batched_tokens=80, block_size=BLOCK, attention_backend="CPU_MLA")
    prompts = [random_prompt(n, n) for n in (40, 300, 350)]
    asked = {"max_tokens": 30, "logprobs": 0}
    outputs, traces = server.traced([(prompt, asked) for prompt in prompts])
    for prompt, output, trace in zip(prompts, outputs, traces):
        np.testing.assert_allclose(logprobs_of(output), expected(model, prompt, output, trace), atol=3e-5)
    assert all(sum(map(bool, trace.evicted[: len(trace.steps) - 30])) > 1 for trace in traces[1:])
    again, traces = server.traced([(prompt, asked) for prompt in prompts])
    for prompt, output, trace in zip(prompts, again, traces):
        assert BLOCK <= trace.start <= 160  # what was computed before the first eviction, in chunks of 80
        trace.steps.insert(0, trace.start)
        trace.evicted.insert(0, [])
        np.testing.assert_allclose(logprobs_of(output), expected(model, prompt, output, trace), atol=3e-5)
    server.assert_nothing_left()


@pytest.mark.oracle("latents")
@pytest.mark.both_runners
def test_layers_reach_blocks_of_the_host(engine, truths, chunks, poisoned):
    """By codes of latent keys, and absorbed queries; chunks of prompts read staged context."""
    folder, _ = truths()
    test_reach.check_classes(engine, DenseAbsorbed(folder), BLOCK, model=folder, attention_backend="CPU_MLA")


def test_layers_read_their_best_blocks(engine, truths, chunks, poisoned):
    """The backend's kernel attends, by a table that each layer writes."""
    folder, _ = truths()
    dense, options = DenseAbsorbed(folder), {"model": folder, "attention_backend": "CPU_MLA"}
    test_read.check_classes(engine, dense, BLOCK, beside=3, **options)


@pytest.fixture
def triton_mla(chunks, monkeypatch):
    """vLLM's Triton backend for latents in the place of the CPU's, and the kernel that makes views on a device."""
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl

    monkeypatch.setattr(TritonMLAImpl, "do_kv_cache_update", CPUMLAImpl.do_kv_cache_update)
    use_kernels(monkeypatch)
    with in_place_of("CPU_MLA", f"{TritonMLABackend.__module__}.{TritonMLABackend.__qualname__}"):
        yield


@pytest.mark.oracle("latents")
@pytest.mark.parametrize("backend, size", [("FLASHMLA", 64), ("FLASHINFER_MLA", 32), ("FLASH_ATTN_MLA", 16)])
def test_builders_for_a_device_plan_by_the_view(engine, truths, chunks, monkeypatch, backend, size):
    """Short chunks of prompts are decodes of several queries there. Kernels have stand-ins."""
    stand_in(monkeypatch, backend)
    folder, model = truths()
    with in_place_of("CPU_MLA", "latent.Shown"):
        sizes = {"budget": 4 * size, "sink": size, "recent": size, "buffer": 0}
        policy = {"name": "knorm", **sizes, "allow": ["sink-window"]}
        server = engine(policy, model=folder, block_size=size, max_num_batched_tokens=192)
    assert server.manager.kv_cache_spec.backend == backend and server.manager.block_size == size
    prompts = [random_prompt(n, n) for n in (30, 400, 500)]
    outputs, traces = server.traced([(prompt, {"max_tokens": 20, "logprobs": 0}) for prompt in prompts])
    for prompt, output, trace in zip(prompts, outputs, traces):
        np.testing.assert_allclose(logprobs_of(output), expected(model, prompt, output, trace, size), atol=3e-5)
    assert all(sum(map(len, trace.evicted)) > 2 for trace in traces[1:])
    server.assert_nothing_left()


@pytest.mark.oracle("latents")
@pytest.mark.both_runners
@pytest.mark.skipif(not HAS_TRITON, reason="vLLM's Triton kernels do not run with this VLLM_EVICT_TEST_RUNNER")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_triton_reads_latents_through_the_view(engine, truths, triton_mla):
    """Decodes beside chunks of prompts, by the interpreter, with policies that a GPU serves."""
    folder, model = truths()
    names = ["sink-window", "knorm", "keydiff"]
    server = engine(
        {"name": "knorm", **SIZES, "allow": names}, model=folder, max_num_batched_tokens=80, block_size=BLOCK
    )
    assert server.manager.kv_cache_spec.backend == "TRITON_MLA"
    prompts = [random_prompt(n, n) for n in (40, 150, 200)]
    asked = [{"max_tokens": 80 if name == "sink-window" else 12, "logprobs": 0} for name in names]
    requests = [{**each, "extra_args": {"kv_policy": name}} for each, name in zip(asked, names)]
    for prompt, output, trace in server.answered(list(zip(prompts, requests))):
        assert any(trace.evicted)
        np.testing.assert_allclose(logprobs_of(output), expected(model, prompt, output, trace), atol=3e-5)
    server.assert_nothing_left()


#: Backends of a device whose scores are compared: vLLM's Triton kernel in the interpreter, and vLLM's builder with a
#: stand-in for its kernel. The plugin's kernels run in the interpreter for both.
SCORED = [
    pytest.param("TRITON_MLA", marks=pytest.mark.skipif(not HAS_TRITON, reason="runs with vLLM's Triton kernels")),
    pytest.param("FLASH_ATTN_MLA", marks=pytest.mark.skipif(HAS_TRITON, reason="runs without vLLM's Triton kernels")),
]


REACHED = [pytest.param(*each.values, 32, marks=each.marks) for each in SCORED]


@pytest.fixture
def on_device(request, chunks, monkeypatch):
    """Makes engines on a backend of a device."""
    use_kernels(monkeypatch)
    take_large_tiles(monkeypatch)

    def make(engine, backend, *args, **kwargs):
        if backend == "TRITON_MLA":
            request.getfixturevalue("triton_mla")
            return engine(*args, **kwargs)
        stand_in(monkeypatch, backend)
        with in_place_of("CPU_MLA", "latent.Shown"):
            return engine(*args, **kwargs)

    return make


@pytest.mark.oracle("latents")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("backend, size", [*REACHED, ("FLASHMLA", 64), ("FLASHINFER_MLA", 64)])
def test_layers_reach_blocks_of_the_host_on_a_device(engine, on_device, truths, poisoned, backend, size):
    folder, _ = truths()
    policy = {**test_reach.REACH, "hold": 1}
    server = on_device(engine, backend, policy, model=folder, block_size=size, max_num_batched_tokens=160)
    assert server.manager.kv_cache_spec.backend == backend
    chosen, dense = 0, DenseAbsorbed(folder)
    for prompt, output, trace in server.answered(random_requests((420, 8), (250, 12))):
        chosen += test_reach.assert_reaches_like_dense(
            None, prompt, output, trace, 256, 1, dense=dense, atol=3e-5, size=size, tables=False
        )
    assert chosen > 10
    test_reach.assert_nothing_left(server)


@pytest.mark.oracle("latents")
@pytest.mark.both_runners("TRITON_MLA")
@pytest.mark.parametrize("backend", SCORED)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_scores_on_a_device_evict_what_those_of_a_cpu_evict(engine, truths, on_device, poisoned, backend):
    """Chunks of prompts beside decodes, under all policies that measure attention; freed blocks are full of NaN."""
    folder, model = truths()
    names = ("h2o", "tova", "snapkv", "rkv", "scissorhands", "keybound")
    prompts = [random_prompt(length, length) for length in (130, 105, 110, 115, 120, 125)]
    asked = [{"max_tokens": 3, "logprobs": 0, "extra_args": {"kv_policy": name}} for name in names]
    asked[0]["max_tokens"] = 18  # decides again
    options = dict(model=folder, max_num_batched_tokens=64, block_size=BLOCK)
    policy = {**H2O, "buffer": 0}
    cpu = engine(policy, **options, attention_backend="CPU_MLA")
    _, wanted = cpu.traced(list(zip(prompts, asked)))
    server = on_device(engine, backend, policy, **options)
    assert server.manager.kv_cache_spec.backend == backend
    outputs, traces = server.traced(list(zip(prompts, asked)))
    for name, prompt, output, trace, want in zip(names, prompts, outputs, traces, wanted):
        assert trace.steps == want.steps and trace.evicted == want.evicted and any(trace.evicted), name
        np.testing.assert_allclose(logprobs_of(output), expected(model, prompt, output, trace), atol=3e-5, err_msg=name)
    assert sum(map(bool, traces[0].evicted)) > 1
    server.assert_nothing_left()


@pytest.mark.parametrize("architecture", MODELS)
def test_full_is_stock_to_the_byte(engine, truths, architecture):
    folder, _ = truths(architecture)
    assert_like_stock(engine, [random_prompt(200)], model=folder)


def importances(model, prompt, size=BLOCK):
    """By transformers, of each block of `size` tokens of a prompt: attention mass of all queries, and the mean norm of its keys.

    A key is the normalised latent beside the shared key, whose norm no rotation changes.
    """
    norms = []

    def projected(module, _, output):
        norms.append(output[0].double().square().sum(-1) if module.weight.dim() == 1 else output[0].double())

    handles = []
    for layer in model.model.layers:
        attention = layer.self_attn
        handles.append(attention.kv_a_proj_with_mqa.register_forward_hook(projected))
        handles.append(attention.kv_a_layernorm.register_forward_hook(projected))
    with torch.no_grad():
        attentions = model(torch.tensor([prompt]), output_attentions=True, use_cache=False).attentions
    for handle in handles:
        handle.remove()
    mass = sum(layer[0].double().sum((0, 1)) for layer in attentions)
    keys = zip(norms[::2], norms[1::2])
    norm = sum((latent + shared[:, 512:].square().sum(-1)).sqrt() for shared, latent in keys)
    return ([float(part.sum()) for part in mass.split(size)], [-float(part.mean()) for part in norm.split(size)])


@pytest.mark.oracle("latents")
@pytest.mark.both_runners("TRITON_MLA")
@pytest.mark.parametrize("backend", ["CPU_MLA", *SCORED, "FLASHINFER_MLA"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_what_goes_first_is_what_transformers_attends_to_least_and_what_has_the_largest_keys(
    engine, truths, on_device, complaints, monkeypatch, backend
):
    """On a device kernels are warmed up, too."""
    reports, report = [], sums.RunningSums.report
    monkeypatch.setattr(sums.RunningSums, "report", lambda *args: reports.append(report(*args)) or reports[-1])
    warmed, warm_up = [], DeviceLatentOps.warm_up_mass
    monkeypatch.setattr(DeviceLatentOps, "warm_up_mass", lambda *args: warmed.append(warm_up(*args)))
    folder, model = truths()
    size = 32 if backend == "FLASHINFER_MLA" else BLOCK
    sizes = {name: tokens * size // BLOCK for name, tokens in SIZES.items()}
    policy = {"name": "h2o", **sizes, "accumulate": "sum"}
    make = engine if backend == "CPU_MLA" else partial(on_device, engine, backend)
    warm = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}}
    server = make(policy, model=folder, block_size=size, max_num_batched_tokens=512, **warm)
    assert bool(warmed) == (backend != "CPU_MLA") and not complaints
    prompt = random_prompt(200 * size // BLOCK)
    masses, norms = importances(model, prompt, size)
    for policy, values in (("h2o", masses), ("knorm", norms)):
        asked = {"max_tokens": 2, "extra_args": {"kv_policy": policy}}
        _, (trace,) = server.traced([(prompt, asked)])
        # These are 13 blocks. The first and the last two stay, and the budget is six.
        order = sorted(range(1, 11), key=values.__getitem__)
        assert values[order[7]] - values[order[6]] > 1e-5 * abs(values[order[6]])
        assert trace.evicted[0] == sorted(order[:7]), policy
    (mass,) = (each.statistics["mass"] for found in reports for each in found.values())
    np.testing.assert_allclose(mass / mass.sum(), np.divide(masses, sum(masses)), rtol=1e-4)


REFUSED = {
    "split heads": (
        {"name": "adakv"},
        "multi-head latent.* while all query heads read one latent head.*h2o, snapkv or sink-window",
    ),
    "head pattern": ({"name": "pyramidkv"}, "while all query heads read one latent head"),
    "context": ({"name": "h2o", "context": 512, **SIZES}, "a context and multi-head latent.*leave context out"),
    "kvzip": (
        {"name": "kvzip"},
        "kvzip and multi-head latent.*, which has no keys of KV heads.*snapkv, h2o and keydiff",
    ),
    "tokens": ({"name": "snapkv", "granularity": "token", **SIZES}, "granularity: token and .*set granularity: block"),
    "read": (
        {"name": "keydiff", **SIZES, "read": 64},
        "read under a policy that scores .*multi-head latent.*set read under",
    ),
}


@pytest.mark.parametrize("backend", ["TOKENSPEED_MLA", "CUTLASS_MLA"])
def test_backends_that_nothing_shows_are_refused_by_name(engine, truths, backend):
    with pytest.raises(
        KVPolicyError,
        match=f"{backend}: set .* on which policies run: CPU_MLA and AMX_MLA, and on a GPU FLASHINFER_MLA",
    ):
        engine(H2O, model=truths()[0], attention_backend=backend)


@pytest.mark.parametrize("what", REFUSED)
def test_what_latents_cannot_do_is_refused_with_what_can_be_done(engine, truths, what):
    policy, message = REFUSED[what]
    with pytest.raises(KVPolicyError, match=message):
        engine(policy, model=truths()[0])
