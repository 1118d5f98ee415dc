"""All that the plugin replaces in vLLM is declared (integration/seams.py), and nothing else changes vLLM's functions."""

import ast
import types
from collections import Counter
from pathlib import Path

import pytest
from guard.seams import OURS, declared, table
from guard.source import FUNCTIONS

from vllm_evict.integration import seams
from vllm_evict.integration.seams import replaces

ROOT = Path(__file__).parents[2]
#: Fields of vLLM's objects to which the plugin writes values. No function or class of vLLM has such a name.
FIELDS = {
    # Configuration.
    *("attention_config", "backend_per_kind", "scheduler_cls", "worker_cls"),
    # Requests, and their parameters.
    *("ec_transfer_params", "extra_args", "kv_cache_report_mode", "kv_transfer_params", "logprobs", "min_tokens"),
    *("num_computed_tokens", "prompt_logprob_start", "prompt_logprob_token_ids", "prompt_logprobs"),
    *("skip_reading_prefix_cache", "structured_outputs"),
    # Outputs and statistics of a step.
    *("finished_requests", "kv_cache_usage", "num_running_reqs", "num_waiting_reqs"),
    # What connectors know of requests.
    *("deferred_fence_block_ids", "fenced_block_ids", "max_offload_tokens"),
    # Metadata that attention backends are built from, and what their builders made of it.
    *("_num_computed_tokens_cache", "_token_to_req_indices_cache", "block_table_tensor", "enable_cuda_graph"),
    *("is_prefilling", "max_query_len", "max_seq_len", "mm_req_doc_ranges", "num_reqs", "query_len"),
    *("query_start_loc_cpu", "seq_lens_cpu_upper_bound", "use_trtllm_attention"),
    # Layers, and the tensors of their caches.
    *("attn_backend", "kv_sharing_target_layer_name", "layer_stride", "num_blocks", "num_gpu_blocks", "num_kv_heads"),
    *("offset", "sliding_window", "store_futures"),
}
#: Functions that write attributes of objects that are not vLLM's, or values under names that are known at run time.
OTHERS = {
    "compute.kernels.decode_cuda:Library.__init__": "argtypes restype",
    "integration.engine.carriers:EvictionStats.of": "__class__",  # of an object that is made in each step
    "integration.engine.followers:LMCacheFollower._stop": "counted",
    "integration.frontend.entrypoints:_with_unknown": "[...]",
    "integration.start.arguments:_Policy.__call__": "self.dest",
    "features.context.start:longer_than_the_model": "[...]",  # the value of one of vLLM's variables
    "integration.start.arguments:_with_keyword": "[...]",
    "integration.worker.backend:drafting_backend": "__qualname__",  # of classes of the plugin's
    "integration.worker.backend:resident_backend": "__qualname__",
    "integration.worker.layers:_ops": "[...]",
    "integration.start.late:_await": "[...] __class__",  # of importlib's spec
    "integration.start.late:_await.Awaited._initializing": "[...]",
}
#: Packages that get objects of vLLM. Tools, such as what stands in for a device, serve nothing.
PACKAGES = ("compute.", "integration.", "features.")


def writes(home, tree):
    """(function, what is written) of each attribute that a module writes to objects other than `self`, outside of
    declared functions.
    """

    def visit(parent, function):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                if not any(ast.unparse(each).startswith("extends(") for each in node.decorator_list):
                    yield from visit(node, f"{function}.{node.name}".lstrip("."))
                continue
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                if ast.unparse(node.value) != "self":
                    yield function, node.attr
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                if any(part in ast.unparse(node.value) for part in ("vars(", "__dict__")):
                    yield function, "[...]"
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "delattr")):
                yield function, ast.unparse(node.args[1])
            yield from visit(node, function)

    return visit(tree, "")


def own_fields():
    """Fields that classes of the plugin declare or set."""
    found = set()
    for _, tree in OURS.modules():
        for cls in ast.walk(tree):
            if isinstance(cls, ast.ClassDef):
                found |= {node.target.id for node in cls.body if isinstance(node, ast.AnnAssign)}
                found |= {
                    getattr(each, "id", "")
                    for node in cls.body
                    if isinstance(node, ast.Assign)
                    for each in node.targets
                }
                found |= {
                    node.attr
                    for node in ast.walk(cls)
                    if isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{node.attr}"
                    if isinstance(node.ctx, ast.Store)
                }
    return {name for name in found if not name.startswith("__")}


def constants():
    """Names of module constants that are names of attributes of the plugin's own."""
    found = set()
    for _, tree in OURS.modules():
        for node in tree.body:
            if isinstance(node, ast.Assign):
                pairs = [(node.targets[0], node.value)]
                if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(node.targets[0].elts, node.value.elts, strict=True)
                found |= {ast.unparse(name) for name, value in pairs if ast.unparse(value).startswith("'kv_evict_")}
    return found


def test_nothing_else_changes_functions_or_classes_of_vllm():
    replaced = {name for each in declared() for _, name in each.replaced}
    known, seen = (own_fields() - replaced) | constants(), Counter()
    assert not FIELDS & replaced
    for home, tree in OURS.modules():
        if home == "integration.seams" or not home.startswith(PACKAGES):
            continue
        for function, name in writes(home, tree):
            seen[name] += 1
            other = name in OTHERS.get(f"{home}:{function}", "").split()
            assert other or name in known | FIELDS or name.startswith("kv_evict"), (
                f"{home}:{function} sets {name}: declare what takes the place of vLLM's functions and classes by "
                "`replaces` or `extends`; a field that has a value goes into FIELDS"
            )
    assert sum(seen.values()) > 60
    assert seen.keys() >= FIELDS, "fields that nothing writes any more"


def test_each_function_is_replaced_once_and_says_why_and_until_when():
    replacing = [each for each in declared() if each.kind == "replaces" and not each.methods]
    (_, most), *_ = Counter(place for each in replacing for place in each.places).most_common(1)
    assert most == 1 and len(replacing) > 20
    for each in declared():
        assert each.why and each.remove_when, each
        # A parameter's `weight_loader` is vLLM's method of that name or the one with `_v2`.
        names = {place.rpartition(".")[2].removesuffix("_v2") for place in each.places}
        assert each.kind == "extends" or each.methods or len(names) == 1, each


def test_homes_are_the_modules_that_declare():
    assert sorted(seams.HOMES) == sorted({each.home for each in declared()})


def test_the_page_has_all_of_them():
    assert (ROOT / "docs/seams.md").read_text().endswith(table())


class Theirs:
    """In the place of a class of vLLM."""

    @staticmethod
    def given(value: int) -> int:
        """vLLM's."""
        return value

    def own(self):
        return "stock"


@pytest.fixture
def seam(monkeypatch):
    """A declared seam of a method, which nothing applies."""
    monkeypatch.setattr(seams, "SEAMS", [])

    @replaces("theirs:Theirs.own", at_import=True, why="-", remove_when="-")
    def ours(stock, more="!"):
        return lambda *args: stock(*args) + more

    return ours


@pytest.fixture
def module():
    """A module of vLLM, and its class."""
    return types.SimpleNamespace(Theirs=type("Theirs", (Theirs,), {}))


def test_a_seam_is_applied_to_a_class_once(seam, module):
    for _ in range(2):
        seams.hooks()["theirs"](module)
        assert module.Theirs().own() == "stock!" and Theirs().own() == "stock"
    assert module.Theirs.own.__wrapped__ is Theirs.own


def test_a_seam_in_one_object_leaves_others_alone(seam):
    one, other = Theirs(), Theirs()
    seam.on(one, "?")
    assert (one.own(), other.own()) == ("stock?", "stock")
    with seam.during(one, "1"), seam.during(other, "2"):
        assert (one.own(), other.own()) == ("stock?1", "stock2")
    assert (one.own(), other.own()) == ("stock?", "stock") and vars(other) == {}


def test_a_static_method_stays_one(module, monkeypatch):
    monkeypatch.setattr(seams, "SEAMS", [])
    replaces("theirs:Theirs.given", why="-", remove_when="-")(lambda stock: lambda value: stock(value) + 1).on(
        module.Theirs
    )
    assert module.Theirs.given(1) == module.Theirs().given(1) == 2 and module.Theirs.given.__doc__ == "vLLM's."
