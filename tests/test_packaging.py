"""The layout of a checkout: nothing is a link, and vLLM's own `triton_kernels` is found beside it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Prints what vLLM finds, and with a checkout on the path that our kernels are found under their own name.
LOOK_UP = """
import sys
import vllm.third_party
vllm.third_party.__path__.extend(sys.argv[1:2])
from vllm.utils.import_utils import get_triton_kernels_version, has_triton_kernels
print(has_triton_kernels(), get_triton_kernels_version(), getattr(sys.modules.get("triton_kernels"), "__file__", None))
if sys.path[0] == "" and __import__("os").path.exists("vllm_evict"):
    import vllm_evict.triton_kernels as ours
    print(*ours.__path__, file=sys.stderr)
"""


def look_up(folder, path, vendored=()):
    """What vLLM says of `triton_kernels`, in a process of its own that starts in a folder with a PYTHONPATH."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK_UP, *map(str, vendored)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1], done.stderr


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    """A folder with the package that vLLM looks for: the modules that tell its generations apart, as of 3.6."""
    package = tmp_path_factory.mktemp("another") / "triton_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "matmul_ogs.py").touch()
    (package / "tensor.py").write_text("class SparseMatrix: ...\n")
    return package.parent


@pytest.mark.parametrize("where", ["nowhere", "path", "vendored"])
def test_vllm_finds_its_triton_kernels_as_without_a_checkout(where, another, tmp_path):
    others = [another] if where == "path" else []
    vendored = [another] if where == "vendored" else []
    expected, _ = look_up(tmp_path, others, vendored)
    stand_in = another / "triton_kernels" / "__init__.py"
    assert expected == ("False None None" if where == "nowhere" else f"True 3.6 {stand_in}")
    # In the checkout, whose root is on the path twice.
    found, errors = look_up(ROOT, [ROOT, *others], vendored)
    assert found == expected
    assert str(ROOT / "triton_kernels") in errors.splitlines()[-1]


def test_without_another_its_import_names_ours(tmp_path):
    code = "import triton_kernels"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("import them as vllm_evict.triton_kernels")


def test_nothing_in_a_checkout_is_a_link():
    """A zip of the repository has no links, nor has a checkout on Windows."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    files = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not [line for line in files.splitlines() if line.startswith("120000")]
