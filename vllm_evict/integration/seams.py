"""Declares by `replaces` and `extends` all that takes the place of vLLM's functions and classes.

A replacement stands beside the part that needs it. `HOMES` names the modules that declare any, and docs/seams.md lists
all of them. Nothing else changes functions or classes of vLLM (`tests/compat/test_seams.py`). A function has one
replacement, which is made by a function that gets vLLM's own:

    @replaces("vllm.v1.engine.core:EngineCore.add_lora", at_import=True, why="...", remove_when="...")
    def add_lora(stock):
        def add_lora(self, lora_request):
            ...
            return stock(self, lora_request)

        return add_lora

With `at_import` it takes its place in every process, as soon as vLLM's module is imported. Others are put into single
objects by their feature (`Seam.on`), so servers that do without the feature run vLLM's own code.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from .start.late import when_imported

#: Modules of `vllm_evict` that declare replacements.
HOMES = (
    # In every process, when vLLM's modules are imported: `--kv-policy`, and what an engine is told.
    "integration.start.arguments",
    "integration.start.fallback",
    "integration.start.reloads",
    "integration.start.ending",
    "integration.start.room",
    # The same, in front ends: requests that ask for what they may not have; usage and counts that users get.
    "integration.frontend.usage",
    "integration.frontend.metrics",
    "integration.frontend.entrypoints",
    # In the engine core: the scheduler, and what vLLM has it call as it allocates and publishes blocks.
    "integration.engine.scheduler",
    "integration.engine.managers",
    "integration.engine.spec",
    "integration.engine.allocation",
    "integration.engine.outdated",
    "integration.engine.reaching",
    "integration.engine.host_events",
    "integration.engine.shadows",
    "integration.engine.poison",
    # In workers: the model as it is loaded, its layers and their backends, the runner's steps, and graphs.
    "integration.worker.worker",
    "integration.worker.cpu_worker",
    "integration.worker.reorder",
    "integration.start.windows",
    "features.context.positions",
    "integration.worker.layers",
    "integration.worker.backend",
    "integration.worker.latents",
    "integration.worker.split",
    "integration.worker.flash",
    "integration.worker.runners",
    "features.audit.worker",
    "integration.worker.graphs",
)
#: Attribute of a class or module of vLLM: the seams that it has.
MARK = "kv_evict_seams"


@dataclass(frozen=True, eq=False)
class Seam:
    """A declared change of functions or classes of vLLM.

    Attributes:
        places: "module:Class.method", "module:function" or "module:Class", of one last name; of an extension also
            "module".
        make: takes vLLM's function or class, and what `on` is given; returns what takes its place. Of an extension:
            takes the object that it changes.
        at_import: whether it is applied to the class or module itself.
    """

    places: tuple[str, ...]
    make: Callable[..., Any]
    at_import: bool

    @property
    def name(self) -> str:
        """Name of the attribute that is replaced."""
        return self.places[0].rpartition(":")[2].rpartition(".")[2]

    def on(self, holder: Any, *state: Any) -> None:
        """Replace the attribute of one object, class or module of vLLM.

        Args:
            holder: has the attribute.
            state: further arguments of `make`.
        """
        stock = getattr(holder, self.name)
        ours = self.make(stock, *state)
        if isinstance(ours, FunctionType):
            functools.update_wrapper(ours, stock)
        if isinstance(inspect.getattr_static(holder, self.name, None), staticmethod):
            ours = staticmethod(ours)
        setattr(holder, self.name, ours)

    def once(self, holder: Any, *state: Any) -> None:
        """Do the same unless the holder has it. It is marked: its methods say nothing, since tracers wrap them too."""
        done = vars(holder).get(MARK, ())
        if self not in done:
            setattr(holder, MARK, (*done, self))
            self.on(holder, *state)

    @contextmanager
    def during(self, holder: Any, *state: Any) -> Iterator[None]:
        """Replace the attribute in a context."""
        own, stock = self.name in vars(holder), getattr(holder, self.name)
        self.on(holder, *state)
        try:
            yield
        finally:
            if own:
                setattr(holder, self.name, stock)
            else:
                delattr(holder, self.name)

    def holder(self, module: ModuleType, path: str) -> Any:
        """Return what has the attribute: the class of "Class.method", or the module."""
        return getattr(module, path.partition(".")[0]) if "." in path else module


class Extension(Seam):
    """A declared change of an object of vLLM that is more than one function: fields of a class, or its parents."""

    def on(self, holder: Any, *state: Any) -> None:
        """Change one object of vLLM."""
        self.make(holder, *state)

    def holder(self, module: ModuleType, path: str) -> Any:
        return getattr(module, path) if path else module


#: Seams of the modules that are imported, in the order in which they were declared.
SEAMS: list[Seam] = []


def replaces(
    *places: str, why: str, remove_when: str, at_import: bool = False, methods: str = ""
) -> Callable[..., Any]:
    """Declare that a function makes, or a class is, what takes the place of vLLM's.

    Args:
        places: see `Seam`. A class names the classes of vLLM of which it is, or becomes, a subclass.
        why: the reason, for maintainers.
        remove_when: what vLLM would need for the replacement to go.
        at_import: see `Seam`.
        methods: of a class, the methods of vLLM's class that it overrides.

    Returns:
        A decorator; of a function it makes a `Seam`, a class stays as it is.
    """
    return _declare(Seam, places, at_import)


def extends(*places: str, why: str, remove_when: str, at_import: bool = False) -> Callable[..., Any]:
    """Declare that a function changes classes, modules or objects of vLLM in another way than by one function.

    The arguments are those of `replaces`; a place names the object, which the function is called with.
    """
    return _declare(Extension, places, at_import)


def _declare(kind: type[Seam], places: tuple[str, ...], at_import: bool) -> Callable[..., Any]:
    def declare(ours: Any) -> Any:
        if isinstance(ours, type):
            return ours
        SEAMS.append(seam := kind(places, ours, at_import))
        return seam

    return declare


def become(holder: Any, cls: type) -> None:
    """Make an object of vLLM one of the plugin's subclass of its class, which `replaces` declares."""
    holder.__class__ = cls


def hooks() -> dict[str, Callable[[ModuleType], None]]:
    """Return each module of vLLM that is changed in every process -> what applies the seams to it, once."""
    found: dict[str, list[tuple[Seam, str]]] = {}
    for seam in SEAMS:
        for place in seam.places if seam.at_import else ():
            module, _, path = place.partition(":")
            found.setdefault(module, []).append((seam, path))
    return {module: functools.partial(_apply, seams) for module, seams in found.items()}


def _apply(seams: list[tuple[Seam, str]], module: ModuleType) -> None:
    for seam, path in seams:
        seam.once(seam.holder(module, path))


def apply() -> None:
    """Apply all that is declared with `at_import`, to each module of vLLM when it is there."""
    for module, hook in hooks().items():
        when_imported(module, hook)
