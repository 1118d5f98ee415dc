"""Facts of a server with a policy, from vLLM's configuration, the platform, and layers once they are loaded."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import vllm.envs as envs
from vllm.platforms import current_platform

from ....compute.attention.backends import LATENT, OPS, UNLIKE, WHOLE_LAYERS
from ....compute.attention.fp8 import CPU_FP8_NAMES, FP8_NAMES
from ....config import KVPolicyConfig
from ....config.features import Feature
from .. import advice, attending, connectors, drafters, fallback, versions, windows
from ..machine import memory_bytes

#: Attention backends that work behind a view, except those of MLA (`LATENT`) and of `UNLIKE` keys and values.
BACKENDS = tuple(name for name in OPS if name not in (*LATENT, *UNLIKE))
#: Those of them that run on a GPU.
DEVICE_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
#: Attention backends of multi-head latent attention (MLA) that run on a GPU.
LATENT_DEVICE_BACKENDS = LATENT[2:]
#: Device -> KV cache dtypes that its backends' ops read, beside the model's own.
READ_DTYPES = {"cpu": ("auto", "float16", "bfloat16", *CPU_FP8_NAMES), "cuda": ("auto", *FP8_NAMES)}
#: The least compute capability for which Triton compiles kernels that read float8_e4m3 (Ada).
FP8_CAPABILITY = (8, 9)
#: Architectures with ALiBi of which vLLM's configuration does not say so.
ALIBI = ("Step1ForCausalLM",)
#: What stands beside plain full attention, or in its place -> methods with layers to set in place of a refused one.
LAYERED: dict[str | None, tuple[str, ...]] = {
    None: ("eagle", "eagle3", "mtp", "draft_model"),
    "latents (MLA)": ("mtp", "eagle3"),
    "states": ("mtp",),
    "sliding windows": ("eagle", "eagle3"),
    "latents (MLA) and linear attention": (),
    "keys and values of unlike dimensions": ("mtp",),
    "chunks of local attention": (),
}
#: The same of methods that Model Runner V2 alone has, where tests run some.
IN_PARALLEL: dict[str, tuple[str, ...]] = {"states": ("dspark",), "sliding windows": ("dflash", "dspark")}
NGRAM = 'set "method": "ngram" in --speculative-config'


class Layers(NamedTuple):
    """Facts that loaded layers tell, all or one of them.

    Attributes:
        evictable: whether some have full attention.
        windows, states: whether some have sliding windows, or states.
        shared: whether some read another layer's cache.
        backend: attention backend of a layer with full attention.
        counts: what in a layer counts how far back a token stands in the block table; "": nothing.
        whose: says which layer, after `backend` or `counts`.
    """

    evictable: bool = True
    windows: bool = False
    states: bool = False
    shared: bool = False
    backend: str | None = None
    counts: str = ""
    whose: str = ""


class Server:
    """A server with a policy. Texts of the table have its facts in braces: `text.format_map(server)`.

    Args:
        vllm_config: vLLM's configuration.
        config: the policy.
        layers: what layers tell, in place of the configuration; None: they are not loaded.
    """

    def __init__(self, vllm_config: Any, config: KVPolicyConfig, layers: Layers | None = None) -> None:
        self.vllm_config, self.config, self.layers = vllm_config, config, layers
        self.model, self.cache = vllm_config.model_config, vllm_config.cache_config
        self.parallel, self.scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        self.drafts, self.transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
        self.text, self.whose = self.model.hf_text_config, layers.whose if layers else ""

    def __getitem__(self, fact: str) -> Any:
        return getattr(self, fact)

    def has(self, part: Any) -> object:
        """Return whether the policy has a `Feature`, or the server is an `Environment`."""
        return part.of(self.config if isinstance(part, Feature) else self)

    def of_text(self, field: str) -> Any:
        """Return a field of the language model's configuration; None if it has none."""
        return getattr(self.text, field, None)

    @property
    def rope_types(self) -> set[str]:
        """Kinds of rotary positions, of all layers."""
        known = self.of_text("rope_parameters") or {}
        return {
            each["rope_type"] for each in (known, *known.values()) if isinstance(each, dict) and "rope_type" in each
        }

    @cached_property
    def platform(self) -> str:
        """Kind of the device. ROCm calls its device cuda too, and one of its backends FLASH_ATTN."""
        return "rocm" if current_platform.is_rocm() else str(self.vllm_config.device_config.device_type)

    @cached_property
    def capability(self) -> tuple[int, ...]:
        """Compute capability of a GPU; one that lacks nothing where there is no GPU or driver to ask."""
        known = current_platform.get_device_capability() if self.platform == "cuda" else None
        return tuple(known or FP8_CAPABILITY)

    @property
    def use_v1(self) -> str:
        return fallback.use_v1(self.vllm_config)

    @property
    def machine(self) -> str:
        """Memory for blocks on the host, and the engines that share it."""
        engines = self.parallel.data_parallel_size_local
        return f"{memory_bytes()}" + f" with {engines} engines" * (engines > 1)

    @property
    def host_bytes(self) -> int:
        """Bytes of memory that each engine takes for blocks on the host."""
        return int(self.config.host or 0)

    @property
    def overflows_machine(self) -> bool:
        return self.host_bytes * self.parallel.data_parallel_size_local > memory_bytes()

    # --- layers ------------------------------------------------------------------------------------------------------

    @cached_property
    def slides(self) -> bool:
        """Whether some layers have windows, or chunks, that hide tokens."""
        return self.layers.windows if self.layers else windows.slide(self.vllm_config)

    @property
    def recycling(self) -> str:
        """The kind of layers that recycle their blocks themselves."""
        return "chunked-local attention" if windows.chunks(self.vllm_config) else "sliding-window attention"

    @property
    def slides_alone(self) -> bool:
        """Whether all layers have such windows."""
        alone = not self.layers.evictable if self.layers else self.cache.sliding_window is not None
        return self.slides and alone

    @property
    def states(self) -> bool:
        """Whether some layers have states."""
        return self.layers.states if self.layers else self.model.is_hybrid

    @property
    def states_alone(self) -> bool:
        """Whether all layers have states."""
        return self.states and not self.layers.evictable if self.layers else self.model.is_attention_free

    @property
    def shares(self) -> bool:
        """Whether some layers read another layer's cache."""
        return self.layers.shared if self.layers else bool(self.of_text("num_kv_shared_layers"))

    @property
    def counts(self) -> str:
        """The part of the model that counts tokens between two in the block table, where holes hide some; "": none."""
        if self.layers:
            return self.layers.counts
        return "ALiBi" * (self.model.uses_alibi or not {*ALIBI}.isdisjoint(self.model.architectures))

    @property
    def beside(self) -> str | None:
        """The kind of layers beside plain full attention, or in its place: a key of `LAYERED`."""
        found = {
            "latents (MLA) and linear attention": self.model.use_mla and self.states,
            "latents (MLA)": self.model.use_mla,
            "states": self.states,
            "keys and values of unlike dimensions": self.key_size is not None,
            "chunks of local attention": windows.chunks(self.vllm_config),
            "sliding windows": self.slides,
        }
        return next((name for name, has in found.items() if has), None)

    @property
    def empty_stage(self) -> bool:
        """Whether a stage of the pipeline has no layers."""
        layers = (envs.VLLM_PP_LAYER_PARTITION or "").split(",")
        stages = self.parallel.pipeline_parallel_size
        return stages > 1 and ("0" in map(str.strip, layers) or self._more_stages)

    @property
    def _more_stages(self) -> bool:
        """Whether the pipeline has more stages than the model layers."""
        return bool(self.model.get_total_num_hidden_layers() < self.parallel.pipeline_parallel_size)

    @property
    def filled_stages(self) -> str:
        """The way to give each stage layers; "": the model has too few."""
        return "set VLLM_PP_LAYER_PARTITION to a layer or more of each stage, or " * (not self._more_stages)

    @cached_property
    def kv_heads(self) -> str:
        """Numbers of KV heads that layers with attention have."""
        return " and ".join(map(str, sorted(set(attending.kv_heads(self.model)))))

    @cached_property
    def head_size(self) -> int:
        return advice.head_size(self.model)

    @property
    def key_size(self) -> int | None:
        """Dimensions of a key whose value has others, in models without latents (MiMo-V2); else None."""
        values = self.of_text("v_head_dim")
        # transformers raises for the head_dim of a model whose layers differ in it (Gemma 4).
        keys = None if values is None or self.of_text("kv_lora_rank") is not None else self.of_text("head_dim")
        return None if keys == values or self.model.use_mla else keys

    # --- KV cache and attention backend ------------------------------------------------------------------------------

    @cached_property
    def dtype(self) -> str:
        return advice.cache_dtype(self.vllm_config)

    @property
    def _read(self) -> list[str]:
        """KV cache dtypes that the plugin's kernels read here. vLLM has no fp8 latents on a CPU."""
        latents = self.platform == "cpu" and self.model.use_mla
        known = READ_DTYPES.get(self.platform, ("auto",))
        return [name for name in known if not (latents and name in CPU_FP8_NAMES)]

    @property
    def unread_dtype(self) -> bool:
        """Whether the plugin's kernels do not read the KV cache's dtype on this platform."""
        own = self.dtype in advice.NAMED_DTYPES and advice.is_own_dtype(self.vllm_config)
        return self.dtype not in self._read and not own

    @property
    def own_dtype(self) -> str:
        return advice.own_dtype(self.vllm_config)

    @property
    def read_dtypes(self) -> str:
        """Dtypes to set in place of one that is not read: the model's own, and fp8 where kernels read it."""
        fp8 = [name for name in self._read if name in CPU_FP8_NAMES]
        if not fp8 or (self.platform == "cuda" and self.capability < FP8_CAPABILITY):
            return self.own_dtype
        return f"{self.own_dtype} or {fp8[0]} ({', '.join(fp8[1:])})"

    @cached_property
    def backend(self) -> str | None:
        """The attention backend for full attention or MLA: a layer's, the named one, or vLLM's choice; None: unknown.

        vLLM is asked only where its choice may be refused. Else the layers' own backends tell.
        """
        if self.layers:
            return self.layers.backend
        named, _ = named_backend(self.vllm_config)
        model = self.model
        asks = model.use_mla or model.is_hybrid or model.is_mm_prefix_lm or len(self.config.classes) > 1
        return advice.chosen(self.vllm_config) if named is None and asks and self.platform == "cuda" else named

    @property
    def backends(self) -> tuple[str, ...]:
        """Attention backends on which policies run."""
        if self.platform == "cuda":
            return self._device_backends
        return LATENT if self.model.use_mla else (*BACKENDS, *self._unlike_backends)

    @property
    def _device_backends(self) -> tuple[str, ...]:
        if self.model.use_mla:
            return LATENT_DEVICE_BACKENDS
        # Of those that let tokens of an image attend to each other, tests run one.
        return ("TRITON_ATTN",) if self.model.is_mm_prefix_lm else (*DEVICE_BACKENDS, *self._unlike_backends)

    @property
    def _unlike_backends(self) -> tuple[str, ...]:
        """Backends that a model chooses itself for keys and values of unlike dimensions, whichever other is named."""
        return () if self.key_size is None else UNLIKE

    @property
    def plans_whole_layers(self) -> bool:
        """Whether the backend's metadata is for all heads of a layer."""
        return self.backend in WHOLE_LAYERS and not advice.takes_no_plan(self.vllm_config)

    @property
    def setting(self) -> str:
        return "--attention-backend" if self.layers else named_backend(self.vllm_config)[1]

    @property
    def served_backends(self) -> str:
        on_cpu, on_gpu = LATENT[:2] if self.model.use_mla else BACKENDS[:1], self._device_backends
        split = len(self.config.classes) > 1 and not advice.takes_no_plan(self.vllm_config)
        if split or any(part.read_prompts for part in self.config.classes.values()):
            on_gpu = tuple(name for name in on_gpu if name not in WHOLE_LAYERS)
        return f"{advice.all_of(on_cpu)}, and on a GPU {advice.all_of(advice.working(self.vllm_config, on_gpu))}"

    @property
    def splitting_backends(self) -> str:
        names = (name for name in DEVICE_BACKENDS if name not in WHOLE_LAYERS)
        return advice.either(advice.working(self.vllm_config, names))

    @property
    def backends_of_any_block(self) -> str:
        names = (name for name in DEVICE_BACKENDS if name != self.backend)
        return advice.either(advice.working(self.vllm_config, names, advice.is_any))

    # --- drafts and connectors ---------------------------------------------------------------------------------------

    @property
    def drafter(self) -> bool:
        """Whether a drafter has layers."""
        return drafters.has_layers(self.vllm_config)

    @property
    def runner(self) -> str:
        return "V2" if self.vllm_config.use_v2_model_runner else "V1"

    @property
    def methods(self) -> str:
        """Methods of speculative decoding that are served on the server's model runner beside the model's layers."""
        also = drafters.ON_V2 if self.runner == "V2" else ("suffix",)
        if self.beside is not None:
            also = IN_PARALLEL.get(self.beside, ()) if self.runner == "V2" else ()
        return ", ".join(("ngram", *LAYERED[self.beside], *also))

    @property
    def serves_on_v2(self) -> bool:
        return versions.serves_on_v2()

    @property
    def drafts_here(self) -> bool:
        """Whether drafts of the method are served on the server's model runner."""
        return self.serves_on_v2 if self.runner == "V2" else self.drafts.method not in drafters.ON_V2

    @property
    def other_way_to_draft(self) -> str:
        if self.runner == "V1":
            return self.other_drafter
        return "leave --speculative-config out" if self.drafts.method in drafters.ON_V2 else self.use_v1

    @property
    def in_parallel(self) -> bool:
        """Whether a drafter drafts all tokens of a step in one pass, by a method that is served."""
        return self.drafts is not None and self.drafts.method in drafters.IN_PARALLEL

    @property
    def other_in_parallel(self) -> str:
        """Architecture of such a drafter that is not the one of tests; else ""."""
        names = getattr(getattr(self.drafts, "draft_model_config", None), "architectures", None) or ()
        return ", ".join(name for name in names if name != drafters.IN_PARALLEL[self.drafts.method])

    @property
    def untried_drafter(self) -> bool:
        """Whether no test runs the drafter beside the model's layers. EAGLE heads are like those of EAGLE-3."""
        if not self.drafter or self.drafts.method == "draft_model" or self.beside in (None, *IN_PARALLEL):
            return False
        method = "eagle3" if self.drafts.method == "eagle" else self.drafts.method
        return method not in LAYERED[self.beside]

    @property
    def ngram(self) -> str:
        """Settings by which n-grams take a drafter's place. vLLM has no async scheduling with them."""
        return NGRAM + (", without --async-scheduling" if self.scheduler.async_scheduling else "")

    @property
    def ngram_by_token(self) -> str:
        """The same beside `granularity: token`; "" beside states, where n-grams do not run."""
        return "" if self.states else self.ngram

    @property
    def other_drafter(self) -> str:
        if not (layered := LAYERED[self.beside]):
            return self.ngram
        return f'set "method" in --speculative-config to {one_of(layered)}, if the model has layers for it, or to ngram'

    @property
    def connector(self) -> str | None:
        return None if self.transfer is None else self.transfer.kv_connector

    @cached_property
    def connectors(self) -> list[Any]:
        """Settings of each KV connector, those in a MultiConnector one by one."""
        return [] if self.connector is None else list(connectors.parts(self.transfer))

    @property
    def stores_alone(self) -> bool:
        """Whether the connector is one of vLLM's own that store blocks, each by itself, and no other."""
        extra = {} if self.transfer is None else self.transfer.kv_connector_extra_config
        chunks = extra.keys() & {"blocks_per_chunk", "block_size"}
        return self.connector in connectors.OFFLOADING and self.connector != connectors.LMCACHE and not chunks

    @property
    def other_connector(self) -> str:
        """A connector that is not served, and whether it is the user's own; "" if there is none."""
        for each in self.connectors:
            if each.kv_connector_module_path:
                return f"{each.kv_connector} of your own"
            if each.kv_connector not in connectors.SERVED:
                return str(each.kv_connector)
        return ""

    @property
    def other_connectors(self) -> str:
        """Settings by which a connector that is served takes the place of one that is not."""
        if self.other_connector.removesuffix(" of your own") in connectors.SERVED:
            return "leave kv_connector_module_path out"
        return f"use {self.served_connectors}, or MultiConnector of these"

    @property
    def served_connectors(self) -> str:
        """Connectors that are served beside the model's layers."""
        stores: tuple[str, ...] = connectors.OFFLOADING
        if self.states or self.slides:
            stores = tuple(name for name in stores if name not in connectors.ONE_TABLE)
        return one_of((*connectors.ARRIVING[:4], *stores))

    @property
    def with_tables(self) -> str:
        """Settings by which layers of each kind get a block table of their own."""
        if windows.chunks(self.vllm_config):
            # vLLM switches its manager off for these, too.
            if self.drafts is not None and self.drafts.use_eagle():
                return self.ngram
            if not envs.VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE:
                return "set VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1"
        for each in self.connectors:
            if each.kv_connector in connectors.ONE_TABLE:
                return f"use {self.served_connectors} in place of {each.kv_connector}, for which vLLM switches it off"
        return "leave --disable-hybrid-kv-cache-manager out"


def one_of(names: Sequence[str]) -> str:
    """Return names of which one is to be set."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def named_backend(vllm_config: Any) -> tuple[str | None, str]:
    """Return the backend that is named for full attention, or MLA, and the setting; None if vLLM chooses one.

    vLLM chooses when it makes the layers. Layers of other kinds may have any backend.
    """
    attention, kind = vllm_config.attention_config, kind_of(vllm_config)
    if (backend := attention.backend_per_kind.get(kind)) is not None:
        return backend.name, f"--attention-config.backend_per_kind.{kind}"
    return getattr(attention.backend, "name", None), "--attention-backend"


def kind_of(vllm_config: Any) -> str:
    """Return vLLM's name for the kind of layers that policies work on."""
    return "mla_attention" if vllm_config.model_config.use_mla else "full_attention"
