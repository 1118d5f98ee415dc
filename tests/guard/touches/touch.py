"""One thing of vLLM that vllm_evict relies on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Touch:
    """One class, function or value of vLLM, and what has to be true of it.

    Attributes:
        where: "module:name"; "module:" for the module itself.
        moved: the same, in releases that have it elsewhere.
        by: modules of vllm_evict that rely on it, without the package's name.
        why: what for.
        bases: classes that it inherits from, directly or not.
        has: attributes of its instances: `x`, `x = value`, `x: type`; methods: `x()`.
        takes_attributes: its instances can be given attributes of ours (no slots, not frozen).
        implemented_by: our subclass, which has to define all its abstract methods.
        kind: decorator that it must have.
        first: names of its first parameters, where ours take or pass them in this order.
        calls: how we call it; `...` for each positional argument.
        replaced_by: our functions in its place, which must take every call that it takes.
        does: code in its body, in this order.
        value: the value.
    """

    where: str
    by: tuple[str, ...]
    why: str
    bases: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    takes_attributes: bool = False
    implemented_by: str = ""
    kind: str = ""
    first: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    replaced_by: tuple[str, ...] = ()
    does: tuple[str, ...] = ()
    value: str | None = None
    moved: str = ""

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    @property
    def name(self) -> str:
        return self.where.partition(":")[2]
