"""Kernels take records: no function around one takes many arguments, and one place hands a record's fields to it."""

import ast
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from vllm_evict.compute.kernels.paged import DecodeShape, PagedAttention
from vllm_evict.compute.kernels.reach import OF_ROWS, ReachRows, ReachState

ROOT = Path(__file__).parents[2]
FILES = [*ROOT.glob("vllm_evict/compute/kernels/*.py"), *ROOT.glob("triton_kernels/*.py")]
MOST = 12


def functions():
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield file, node


def is_compiled(function):
    """Whether Triton compiles it, whose kernels take pointers and sizes one by one."""
    return any("jit" in ast.unparse(each) for each in function.decorator_list)


def test_functions_around_kernels_take_few_arguments():
    seen = {
        f"{file.stem}.{node.name}": len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
        for file, node in functions()
        if not is_compiled(node)
    }
    assert len(seen) > 100 and not {name for name, count in seen.items() if count > MOST}


def test_a_compiled_kernel_is_launched_by_one_function():
    compiled, launchers = {node.name for _, node in functions() if is_compiled(node)}, {}
    for file, function in functions():
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launchers.setdefault(ast.unparse(node.func.value), set()).add((file.stem, function.name))
    launched = {name: by for name, by in launchers.items() if name in compiled}
    assert len(launched) > 10 and {len(by) for by in launched.values()} == {1}, launched


@pytest.mark.parametrize("kind", [DecodeShape, PagedAttention, ReachRows, ReachState])
def test_records_of_kernels_are_frozen(kind):
    assert is_dataclass(kind) and kind.__dataclass_params__.frozen and "__slots__" in vars(kind)


def test_numbers_of_rows_are_those_before_the_blocks_they_name():
    names = [each.name for each in fields(ReachRows)]
    assert list(OF_ROWS) == names[:11] and names[11] == "written"
