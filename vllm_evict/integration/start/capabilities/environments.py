"""The table of refusals: each row is a thing that a server may be, and names what does not run on such a server.

Rows of servers that draft are in `drafting`.
"""

import vllm.envs as envs
from vllm.v1.executor.abstract import Executor

from ....compute.attention.device import DECODED_HEADS, READ_HEADS
from ....compute.attention.fp8 import FP8_NAMES
from ....config.features import (
    ANY,
    CONTEXT,
    EVICTS,
    HOST,
    KVZIP,
    MAX,
    PRESSURE,
    PROMPTS,
    READ,
    READ_OF_LAYERS,
    READ_OF_SOME,
    READS,
    SCORES,
    SPLIT,
    TOKENS,
)
from .. import connectors, versions, windows
from . import drafting
from .drafting import OLD_V2, SPECULATION
from .environment import UNTRIED, Environment
from .server import FP8_CAPABILITY

#: The least compute capability that the plugin's kernels were compiled for: older GPUs have too little shared memory.
LEAST_CAPABILITY = (8, 0)


# --- platform, front end, executor -----------------------------------------------------------------------------------

PLATFORM = Environment(
    "vLLM's {platform} engine in this release",
    lambda server: server.platform not in ("cpu", "cuda"),
    {ANY: ""},
    "serve on vLLM's CPU or CUDA engine",
)
GPU = Environment(
    "a GPU",
    lambda server: server.platform != "cpu",
    {
        READ_OF_LAYERS: "whose kernels have one length for all layers",
        READ_OF_SOME: UNTRIED,
    },
)
OLD_GPU = Environment(
    "a GPU of compute capability {capability[0]}.{capability[1]}",
    lambda server: server.capability < LEAST_CAPABILITY,
    {SCORES: "while the plugin's kernels need 8.0 (Ampere) or newer"},
)
BATCH_INVARIANT = Environment(
    "VLLM_BATCH_INVARIANT",
    lambda server: server.platform == "cuda" and envs.VLLM_BATCH_INVARIANT,
    {ANY: "because the plugin's decode kernel splits keys by the size of the batch"},
    "unset it",
)
RUST = Environment(
    "vLLM's Rust front end",
    lambda server: envs.VLLM_USE_RUST_FRONTEND,
    {ANY: "which does not check the fields of requests and has no metrics of eviction"},
    "unset VLLM_USE_RUST_FRONTEND",
)
OLD_RAY = Environment(
    "vLLM's older Ray executor",
    lambda server: any(
        each.__name__ == "RayDistributedExecutor" for each in Executor.get_class(server.vllm_config).__mro__
    ),
    {ANY: "which runs steps past the worker"},
    "unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND, or set it to 1",
)
SCHEDULER = Environment(
    "a scheduler class of your own",
    lambda server: server.scheduler.scheduler_cls is not None,
    {ANY: "because eviction needs its own"},
    "leave --scheduler-cls out",
)

# --- classes of models -----------------------------------------------------------------------------------------------

POOLING = Environment(
    "pooling models", lambda server: server.model.runner_type == "pooling", {ANY: "which keep no cache between steps"}
)
INDEXED = "whose indexer has a cache of its own that would have to lose the same blocks, while queries read few tokens"
DSA = Environment(
    "sparse attention (DSA)",
    lambda server: server.of_text("index_topk") is not None,
    {ANY: INDEXED},
    "leave --kv-policy out, and set --attention-config.hisparse_config to keep the cache in host memory",
)
CSA = Environment(
    "compressed sparse attention (CSA)", lambda server: server.of_text("compress_ratios") is not None, {ANY: INDEXED}
)
MSA = Environment(
    "block-sparse attention (MSA)", lambda server: server.of_text("sparse_attention_config") is not None, {ANY: INDEXED}
)
INKLING = Environment(
    "attention of Inkling's own",
    lambda server: any(name.startswith("Inkling") for name in server.model.architectures),
    {ANY: "whose kernels and pages the plugin can't read"},
)
DIFFKV = Environment(
    "keys of {key_size} and values of {text.v_head_dim} dimensions",
    lambda server: server.key_size is not None,
    {
        SPLIT: "while the plugin's kernels decode values of the keys' dimensions",
        TOKENS: "of which no kernel of the plugin gathers tokens",
        **dict.fromkeys((KVZIP, CONTEXT, READ_OF_LAYERS, READ_OF_SOME, PROMPTS), UNTRIED),
    },
)
STATES_ALONE = Environment(
    "Mamba or linear attention in all layers",
    lambda server: server.states_alone,
    {ANY: "whose states do not grow, so that there is nothing to evict"},
)
WINDOWS_ALONE = Environment(
    "sliding-window attention in all layers",
    lambda server: server.slides_alone,
    {ANY: "which recycle their blocks themselves, so that there is nothing to evict"},
)
ENCODER = Environment("encoder-decoder models", lambda server: server.model.is_encoder_decoder, {ANY: ""})
PREFIX_LM = Environment(
    "images whose tokens attend to each other",
    lambda server: server.model.is_mm_prefix_lm,
    dict.fromkeys((SPLIT, TOKENS, KVZIP, CONTEXT, READ_OF_LAYERS, READ_OF_SOME, PROMPTS), UNTRIED),
    "set --language-model-only, which serves text alone",
)
DIFFUSION = Environment("models with non-causal attention", lambda server: server.model.is_diffusion, {ANY: ""})
CHUNKED = Environment(
    "chunked-local attention layers",
    lambda server: windows.chunks(server.vllm_config),
    {TOKENS: UNTRIED},
    "set --max-model-len {text.attention_chunk_size} or less, where chunks hide nothing",
)
RSWA = Environment(
    "layers that attend to their prompt and a sliding window",
    lambda server: server.model.rswa_window is not None,
    {ANY: "of which backends count tokens of the cache"},
    "set --hf-overrides.rswa_window null, with which layers attend to all tokens that a policy keeps",
)
#: Keys carry their rotation, which holes do not change. These terms are the backend's: they would count tokens of a
#: view, and tokens in front of a hole would come nearer.
DISTANCES = Environment(
    "{counts}{whose}",
    lambda server: server.counts,
    {EVICTS: "which counts how far back tokens stand: that would change where blocks between are evicted"},
)
MROPE = Environment(
    "rotary positions of several dimensions (M-RoPE)",
    lambda server: server.model.uses_mrope,
    {CONTEXT: "which count no tokens"},
)
LONG_ROPE = Environment(
    "rotary positions that depend on a prompt's length (LongRoPE)",
    lambda server: "longrope" in server.rope_types,
    {CONTEXT: "whose angles don't grow evenly"},
)
UNLIKE_HEADS = Environment(
    "layers of {kv_heads} KV heads",
    lambda server: "and" in server.kv_heads,
    {SPLIT: "which take equally many heads of each layer"},
)
UNREAD_HEADS = Environment(
    "heads of {head_size} dimensions",
    lambda server: server.platform == "cuda" and not server.model.use_mla and server.head_size not in READ_HEADS,
    {READS: f"of which the plugin's kernels read {READ_HEADS[0]} to {READ_HEADS[-1]}"},
)
UNDECODED_HEADS = Environment(
    "heads of {head_size} dimensions",
    lambda server: server.platform == "cuda" and not server.model.use_mla and server.head_size not in DECODED_HEADS,
    {SPLIT: f"while the plugin's kernels decode {DECODED_HEADS[0]} to {DECODED_HEADS[-1]}"},
)
MLA = Environment(
    "multi-head latent attention (MLA)",
    lambda server: server.model.use_mla,
    {
        SPLIT: "while all query heads read one latent head",
        TOKENS: "for which no kernel of the plugin gathers tokens",
        KVZIP: "which has no keys of KV heads to score",
        CONTEXT: "which rotates a part of its keys only",
        READ_OF_LAYERS: "whose kernels have one length for all layers",
        READ_OF_SOME: UNTRIED,
        PROMPTS: "whose prompts read no block table",
    },
)
STATES = Environment(
    "Mamba, linear attention or short convolutions beside full attention",
    lambda server: server.states,
    {
        SPLIT: "which belong to no layer",
        KVZIP: "where the prefix cache lacks states to repeat a prompt",
        CONTEXT: "whose states keep the positions that keys lose",
        READ_OF_LAYERS: UNTRIED,
    },
)
WINDOWS = Environment(
    "{recycling} beside full attention",
    lambda server: server.slides,
    {
        SPLIT: "which belong to no layer",
        KVZIP: "where the prefix cache lacks their blocks to repeat a prompt",
        CONTEXT: "where only these layers may have positions",
        READ_OF_LAYERS: "among which the first layers are not counted",
    },
)
SHARED = Environment(
    "layers that share a cache",
    lambda server: server.shares,
    {
        SPLIT: "which a layer without a cache can't read",
        **dict.fromkeys((KVZIP, CONTEXT, READ_OF_LAYERS), UNTRIED),
    },
)

# --- connectors ------------------------------------------------------------------------------------------------------

OTHER_CONNECTOR = Environment(
    "the KV connector {other_connector}",
    lambda server: server.other_connector,
    {ANY: "which may store blocks that were computed over holes"},
    "{other_connectors}",
)
BOTH_WAYS = Environment(
    "the KV connector {connector} and bidirectional_kv_xfer",
    lambda server: any(each.get_from_extra_config("bidirectional_kv_xfer", False) for each in server.connectors),
    {ANY: "which reads blocks of requests that have ended here"},
    "leave bidirectional_kv_xfer out",
)
CONNECTOR = Environment(
    "the KV connector {connector}",
    lambda server: server.transfer,
    {
        SPLIT: "which other engines and the host don't know",
        KVZIP: "because kvzip reads prompts again",
        CONTEXT: "",
        READ: "",
    },
    "leave --kv-transfer-config and --kv-offloading-size out",
)
UNREACHED_CONNECTOR = Environment(
    "the KV connector {connector}",
    lambda server: server.transfer and not server.stores_alone,
    {HOST: UNTRIED},
    "use OffloadingConnector or SimpleCPUOffloadConnector, or leave --kv-transfer-config and --kv-offloading-size out",
)
LMCACHE = Environment(
    f"the KV connector {connectors.LMCACHE}",
    lambda server: any(each.kv_connector == connectors.LMCACHE for each in server.connectors),
    {STATES: "whose states LMCache 0.5.1 does not take from vLLM 0.32"},
    "use {served_connectors}",
)
SEVERAL = Environment(
    "MultiConnector",
    lambda server: server.connector == "MultiConnector",
    {},
    "use one KV connector without MultiConnector",
)
ASYNC_CONNECTOR = Environment(
    "the KV connector {connector} under async scheduling",
    lambda server: server.connector is not None and server.vllm_config.max_concurrent_batches > 1,
    {PRESSURE: "where what is evicted is free a step too late"},
    "set --no-async-scheduling",
)
ENCODER_CACHE = Environment(
    "an encoder-cache connector",
    lambda server: server.vllm_config.ec_transfer_config is not None,
    {ANY: ""},
    "leave --ec-transfer-config out",
)

# --- attention backends, caches --------------------------------------------------------------------------------------

BACKEND = Environment(
    "the attention backend {backend}{whose}",
    lambda server: server.backend is not None and server.backend not in server.backends,
    {ANY: ""},
    "set {setting} to one on which policies run: {served_backends}",
)
WHOLE_LAYER_BACKEND = Environment(
    "the attention backend {backend}{whose}",
    # On a CPU vLLM takes its own, whichever is named.
    lambda server: server.plans_whole_layers and (server.layers or server.platform == "cuda"),
    {SPLIT: "while the backend plans for all heads of a layer"},
    "set {setting} to {splitting_backends}",
)
SPLITTING_BACKEND = Environment(
    "the attention backend FLASHINFER beside states",
    lambda server: server.platform == "cuda" and server.backend == "FLASHINFER" and server.states,
    dict.fromkeys((HOST, READ), "whose kernels split the pool's blocks, by which layers choose"),
    "set {setting} to {backends_of_any_block}",
)
ROWS_OF_REQUESTS_BACKEND = Environment(
    "the attention backend FLASHINFER",
    lambda server: server.platform == "cuda" and server.backend == "FLASHINFER",
    {PROMPTS: "whose plan has no more rows than requests, while a prompt is cut into rows"},
    "set {setting} to {backends_of_any_block}",
)
FEW_SIZES_BACKEND = Environment(
    "the attention backend {backend}",
    lambda server: server.platform == "cuda" and server.backend == "FLASHINFER" and not versions.splits_in_builders(),
    {STATES: "whose kernels read blocks of a few sizes, while vLLM makes blocks as large as states"},
    "set {setting} to {backends_of_any_block}",
)
ONE_TABLE = Environment(
    "vLLM's hybrid KV cache manager switched off",
    lambda server: server.scheduler.disable_hybrid_kv_cache_manager,
    dict.fromkeys((STATES, WINDOWS), "which leaves all layers one block table"),
    "{with_tables}",
)
FAST_PREFILL = Environment(
    "fast prefill over shared caches",
    lambda server: server.cache.kv_sharing_fast_prefill,
    {ANY: "where most queries of a prompt skip the layers that share, and count in no score"},
    "leave --kv-sharing-fast-prefill out",
)
TURBOQUANT = Environment(
    "KV cache dtype {dtype!r}",
    lambda server: server.dtype.startswith("turboquant"),
    {ANY: "which no backend reads on which policies run"},
    "use {read_dtypes}",
)
UNREAD_DTYPE = Environment(
    "KV cache dtype {dtype!r}",
    lambda server: server.unread_dtype and not TURBOQUANT.of(server),
    {READS: "which the plugin can't read on vLLM's {platform} engine"},
    "use {read_dtypes}",
)
FP8_ON_OLD_GPU = Environment(
    "KV cache dtype {dtype!r} on a GPU of compute capability {capability[0]}.{capability[1]}",
    lambda server: server.dtype in FP8_NAMES and server.capability < FP8_CAPABILITY,
    {SCORES: "while Triton has its numbers from 8.9 on"},
    "use {own_dtype}",
)
UNLIKE_DTYPES = Environment(
    "KV cache dtypes that differ between layers",
    # vLLM itself leaves some layers as they are beside TurboQuant.
    lambda server: set(server.cache.kv_cache_dtype_skip_layers) - {"sliding_window"} and not TURBOQUANT.of(server),
    {READS: ""},
    "leave --kv-cache-dtype-skip-layers out",
)
UNCACHED = Environment(
    "prefix caching off",
    lambda server: not server.cache.enable_prefix_caching,
    {KVZIP: "which leaves no cache to reconstruct prompts from"},
    "leave --no-enable-prefix-caching out",
)
SMALL_MACHINE = Environment(
    "host: {host_bytes} bytes on a machine of {machine}",
    lambda server: server.overflows_machine,
    {ANY: ""},
    "set less than the machine, or its container, has for each engine, beside what the model takes, or evict: drop",
)

# --- parallelism -----------------------------------------------------------------------------------------------------

CONTEXT_PARALLELISM = Environment(
    "context parallelism",
    lambda server: max(server.parallel.decode_context_parallel_size, server.parallel.prefill_context_parallel_size) > 1,
    {ANY: ""},
    "set --decode-context-parallel-size 1 and --prefill-context-parallel-size 1",
)
LAUNCHER = Environment(
    "an external launcher",
    lambda server: server.parallel.distributed_executor_backend == "external_launcher",
    {},
    "leave --distributed-executor-backend out",
)
PIPELINE = Environment(
    "pipeline parallelism",
    lambda server: server.parallel.pipeline_parallel_size > 1,
    {
        SPLIT: "which stages would have to share",
        TOKENS: "",
        KVZIP: "",
        CONTEXT: "",
        HOST: "",
        READ: "",
        MAX: "whose stages add up what they measure",
        WINDOWS: "where vLLM groups layers over all stages",
        STATES: "where vLLM groups layers over all stages",
        MLA: UNTRIED,
        SPECULATION: "",
        CONNECTOR: "",
        OLD_V2: UNTRIED,
        LAUNCHER: "whose stages would each have a scheduler",
    },
    "use --tensor-parallel-size in place of --pipeline-parallel-size",
)
EMPTY_STAGE = Environment(
    "a stage of the pipeline without layers",
    lambda server: server.empty_stage,
    {ANY: UNTRIED},
    "{filled_stages}use --tensor-parallel-size in place of --pipeline-parallel-size",
)
MICROBATCHES = Environment(
    "dual-batch overlap or microbatches",
    lambda server: server.parallel.use_ubatching,
    {ANY: ""},
    "leave --enable-dbo and --ubatch-size out",
)
LAUNCHED_RANKS = Environment(
    "data parallelism under an external launcher",
    lambda server: server.parallel.data_parallel_size > 1 and LAUNCHER.of(server),
    {ANY: "where a rank without requests runs the model too"},
    "leave data_parallel_size out, or serve with --data-parallel-size",
)

# --- audits ----------------------------------------------------------------------------------------------------------

ADAPTERS = Environment(
    "LoRA adapters", lambda server: server.vllm_config.lora_config is not None, {}, "leave --enable-lora out"
)
EXPERT_RANKS = Environment(
    "data parallelism of experts",
    lambda server: server.parallel.data_parallel_size > 1 and server.model.is_moe,
    {},
    "leave --data-parallel-size out",
)
AUDIT = Environment(
    "audit",
    lambda server: server.config.audit,
    {
        SPLIT: "",
        CONTEXT: "whose requests outgrow what full attention could read",
        HOST: UNTRIED,
        READ: "",
        SPECULATION: "",
        CONNECTOR: "",
        PIPELINE: UNTRIED,
        STATES: UNTRIED,
        WINDOWS: UNTRIED,
        ADAPTERS: "whose logits vLLM computes for sampled rows alone",
        EXPERT_RANKS: "whose ranks step together",
    },
    "leave audit out",
)

_ROWS, _DRAFTING = tuple(globals().values()), tuple(vars(drafting).values())
#: All of them, in the order of messages: those of this file, and those of `drafting`.
ENVIRONMENTS = tuple(
    each
    for each in (*(row for row in _ROWS if row not in (SPECULATION, OLD_V2)), *_DRAFTING)
    if isinstance(each, Environment)
)
#: Those of them that depend on the attention backend: another one may not have them.
OF_BACKENDS = (BACKEND, WHOLE_LAYER_BACKEND, SPLITTING_BACKEND, ROWS_OF_REQUESTS_BACKEND, FEW_SIZES_BACKEND)
#: Those of them that loaded layers may tell of, where a configuration did not.
OF_LAYERS = (
    STATES_ALONE,
    WINDOWS_ALONE,
    DISTANCES,
    STATES,
    WINDOWS,
    SHARED,
    ONE_TABLE,
    BACKEND,
    WHOLE_LAYER_BACKEND,
    SPLITTING_BACKEND,
    ROWS_OF_REQUESTS_BACKEND,
)
