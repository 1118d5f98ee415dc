"""A stock attention backend behind a resident view, with a mass pass beside it where one is wanted.

Nothing here knows which backend it is: the view is made of block tables and lengths, which all of them read. What is
special to one lies in a `ScorePass`.
"""

from functools import partial
from typing import Any, Protocol

from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, replace_as

from ..core.spec import EvictableSpec
from ..worker.runtime import EvictionRuntime
from .queries import Queries

#: Attribute of a backend's metadata that holds the step's `MassStep`.
MASS = "kv_evict_mass"


class ScorePass(Protocol):
    """Adds the attention mass of one layer to `out` (see `attention.mass.block_mass`, and `Queries`)."""

    def __call__(
        self,
        layer: Any,
        query: Any,
        kv_cache: Any,
        metadata: Any,
        scale: float,
        weights: Any,
        out: Any,
        queries: Queries | None = None,
    ) -> None: ...


def resident_backend(backend: type, runtime: EvictionRuntime) -> type:
    """A subclass of an `AttentionBackend` whose metadata builder looks through `runtime`'s view."""

    class ResidentBuilder(backend.get_builder_cls()):
        def __init__(self, kv_cache_spec: AttentionSpec, *args: Any, **kwargs: Any) -> None:
            super().__init__(kv_cache_spec, *args, **kwargs)
            if kv_cache_spec.block_size != runtime.block_size:
                raise ValueError(
                    f"{backend.get_name()} splits KV blocks of {runtime.block_size} tokens into kernel blocks of "
                    f"{kv_cache_spec.block_size}, which a KV policy can't evict: use --block-size "
                    f"{kv_cache_spec.block_size}"
                )

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            common_attn_metadata, mass = runtime.view(common_attn_metadata)
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            setattr(metadata, MASS, mass)
            return metadata

    class ResidentBackend(backend):
        @staticmethod
        def get_builder_cls() -> type:
            return ResidentBuilder

        @classmethod
        def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
            spec = super().customize_spec(spec)
            if type(spec) is FullAttentionSpec:
                spec = replace_as(spec, EvictableSpec, backend=backend.get_name())
            return spec

    # vLLM groups layers by their backend's name.
    ResidentBackend.__qualname__ = f"Resident[{backend.__qualname__}]"
    return ResidentBackend


def scored_impl(impl: type, score_pass: ScorePass) -> type:
    """A subclass of an `AttentionImpl` that measures after it has attended, when the step's metadata says so."""

    class ScoredImpl(impl):
        def forward(
            self,
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            attn_metadata: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            output = super().forward(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)
            if (mass := getattr(attn_metadata, MASS, None)) is not None:
                mass.add(partial(score_pass, layer, query, kv_cache, attn_metadata, self.scale))
            return output

    return ScoredImpl
