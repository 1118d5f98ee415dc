"""Releases of vLLM: checked ones are served, others if all that the plugin touches is as in a checked one."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from time import process_time

import pytest
import releases
import vllm
from guard.source import Edited, Sources
from vllm.engine.arg_utils import EngineArgs

from vllm_evict import KVPolicyError
from vllm_evict.integration.start import versions

PACKAGE = Path(vllm.__file__).parent
HERE = vllm.__version__.partition("+")[0]
BLOCK_POOL = "vllm.v1.core.block_pool"
#: Changes of vLLM in functions that the plugin touches: (module, from, to), and what a refusal names.
TOUCHED = {
    "a called method": (
        (BLOCK_POOL, "if blk.block_hash is not None:", "if blk.block_hash:"),
        "BlockPool.cache_full_blocks (vllm/v1/core/block_pool.py)",
    ),
    "a method that an invariant reads": (
        (BLOCK_POOL, "            block.ref_cnt += 1\n            if self.metrics", "            if self.metrics"),
        "BlockPool.touch (vllm/v1/core/block_pool.py)",
    ),
    "a replaced method": (
        ("vllm.v1.core.sched.scheduler", "def _free_request(", "def _end_request("),
        "Scheduler._free_request (vllm/v1/core/sched/scheduler.py, gone)",
    ),
    "an inherited method": (
        (
            "vllm.v1.worker.cpu_worker",
            "class CPUWorker(Worker):\n",
            "class CPUWorker(Worker):\n    def load_model(self): ...\n\n",
        ),
        "CPUWorker.load_model (vllm/v1/worker/cpu_worker.py)",
    ),
    "a decorator": (
        ("vllm.config.vllm", "    @property\n    def max_in_flight_tokens", "    def max_in_flight_tokens"),
        "VllmConfig.max_in_flight_tokens (vllm/config/vllm.py)",
    ),
}


@pytest.fixture(scope="module")
def installed():
    return Sources(PACKAGE)


@pytest.fixture
def warned(monkeypatch):
    """Return the plugin's warnings; what is said once can be said again."""
    for once in (versions._warn_not_run, versions._say_identical):
        once.cache_clear()
    lines = []
    # No handler: vLLM sets its loggers up anew when it configures an engine.
    monkeypatch.setattr(logging.getLogger("vllm.evict"), "warning", lambda text, *args: lines.append(text % args))
    return lines


def refusal(version, sources):
    with pytest.raises(KVPolicyError) as error:
        versions.check(version, sources)
    message = str(error.value)
    assert f"vLLM {version}," in message and "\n" not in message and message.endswith("or leave --kv-policy out")
    assert all(f"vllm=={checked}" in message for checked in versions.CHECKED)
    return message


@pytest.mark.parametrize("build", ["", "+cpu", "+cu130"])
@pytest.mark.parametrize("version", versions.CHECKED)
def test_checked_releases_are_served_unread(version, build, warned):
    for _ in range(2):
        versions.check(version + build, Sources(Path("/nowhere")))
    only_read = (
        f"the sources of vLLM {version}{build}, not run on it; it has been run on vLLM {', '.join(versions.RUN)}"
    )
    assert len(warned) == (version not in versions.RUN) and all(only_read in line for line in warned)


def test_what_is_said_to_have_been_run_is_what_runs_here_and_what_has_results():
    """A release on another's compiled parts is not among them: of its own build nothing has run."""
    found = releases.results()
    whole = {release for release, result in found.items() if "borrowed" not in result}
    assert set(versions.RUN) == {HERE, *whole} and {*versions.RUN, *found} <= set(versions.CHECKED)
    for release, result in found.items():
        assert result["runs"] and not any(entry["failed"] for run in result["runs"].values() for entry in run.values())
        assert versions.check(release) is None


def test_the_table_of_releases_is_that_of_the_results():
    page = (Path(__file__).parents[2] / "docs/limits.md").read_text()
    assert f"<!-- python tests/harness/releases.py -->\n{releases.table()}\n" in page


@pytest.mark.parametrize(
    "version",
    [
        *("0.32.1", "0.99.0", "0.33.0rc1", "0.33.0.dev5+g4ba787e", "1.0.0", "0.32.0.post1", "0.32.0+d20261128", "dev"),
        *("0.32.0+fork", "0.32.0+cu130.fork", "1!0.32.0", "0.32", "v0.32.0"),
    ],
)
def test_another_release_is_served_with_one_line_if_all_that_is_touched_is_the_same(version, installed, warned):
    for _ in range(2):
        versions.check(version, installed)
    (line,) = warned
    assert f"not been tested with vLLM {version}; all " in line and f"are those of vLLM {HERE}, so it serves" in line


@pytest.mark.parametrize("change", TOUCHED)
def test_a_touched_function_that_changed_is_named(change, installed, warned):
    edit, named = TOUCHED[change]
    for version in ("0.32.1", "0.32.0.post1", "0.32.0+fork"):
        message = refusal(version, Edited(installed, *edit))
        assert f"which differs from vLLM {HERE} in {named}: install" in message and not warned


@pytest.mark.parametrize("version, later", [("0.31.0", 0), ("0.32.0+cpu", 1), ("0.33.0.post1", 2), ("dev", 2)])
def test_one_version_is_asked(version, later, monkeypatch):
    """That of the package which is imported, whatever a distribution called vllm says."""
    monkeypatch.setattr(vllm, "__version__", version)
    assert (versions.serves_on_v2(), versions.layers_size_blocks("cpu")) == (later > 0, later > 1)
    assert versions.layers_size_blocks("cuda")


COMMENT = (BLOCK_POOL, "# ref_cnt=0 means this block is in", "# ref_cnt=0: this block is in")


@pytest.mark.parametrize(
    "edit",
    [
        (BLOCK_POOL, "def get_usage(self) -> float:", "def usage_of_blocks(self) -> float:"),
        COMMENT,
    ],
    ids=["another function", "a comment"],
)
def test_other_changes_do_not_count(edit, installed, warned):
    versions.check("0.32.1", Edited(installed, *edit))
    assert len(warned) == 1


def test_a_refusal_of_many_changes_names_a_few(tmp_path):
    message = refusal("0.40.0", Sources(tmp_path))
    assert message.count(", gone)") == versions.NAMED and " more functions: install" in message


def test_a_patch_release_costs_no_half_second(installed):
    """Of processor time: files that a checked release has, too, are not parsed."""
    taken = []
    for _ in range(3):
        sources = Edited(Sources(PACKAGE), *COMMENT)
        start = process_time()
        versions.check("0.32.1", sources)
        taken.append(process_time() - start)
    assert min(taken) < 0.5 and 1 <= sum(tree is not None for tree in sources._trees.values()) <= 3


def test_a_release_is_refused_only_when_a_policy_is_asked_for(tiny, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    EngineArgs(model=str(tiny)).create_engine_config()
    monkeypatch.setattr(versions, "_compare", lambda sources, known: ("0.33.0", ["vllm:Engine.step"]))
    EngineArgs(model=str(tiny)).create_engine_config()
    with pytest.raises(KVPolicyError, match=r"0\.99\.0.*vllm==0\.33\.0"):
        EngineArgs(model=str(tiny), kv_policy="h2o").create_engine_config()


RUN = """
import sys, vllm
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_policy={"name": "sink-window", "budget": 96, "sink": 32, "recent": 32}, dtype="float32",
    block_size=32, max_model_len=512, num_gpu_blocks_override=64, kv_cache_memory_bytes=16 << 20, enforce_eager=True)
params = SamplingParams(max_tokens=8, ignore_eos=True, extra_args={"kv_usage": True})
(output,) = llm.generate({"prompt_token_ids": list(range(200))}, params)
print(vllm.__version__, vllm.__file__, output.kv_usage.evicted_blocks)
"""


def copied(folder, edits):
    """A package vllm in `folder`: links to the installed one, and files of its own where edits say so."""
    for file, text in edits.items():
        for parent in reversed(Path(file).parents):
            original, copy = PACKAGE / parent, folder / "vllm" / parent
            if copy.is_symlink():
                copy.unlink()
            if not copy.exists():
                copy.mkdir(parents=True)
                for entry in original.iterdir():
                    (copy / entry.name).symlink_to(entry)
        path = folder / "vllm" / file
        path.unlink()
        path.write_text(text)


def test_a_copy_under_another_version(tiny, tmp_path):
    """It starts and evicts; with a touched line changed it is refused."""
    release = (PACKAGE / "_version.py").read_text().replace(HERE, "0.32.1")
    copied(tmp_path, {"_version.py": release})
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(versions.__file__).parents[2]}"}
    command = [sys.executable, "-c", RUN, str(tiny)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count("not been tested with vLLM 0.32.1; all") == 1
    version, file, evicted = done.stdout.split("\n")[-2].split()
    assert version == "0.32.1" and Path(file).is_relative_to(tmp_path) and int(evicted) > 0

    (_, before, after), named = TOUCHED["a called method"]
    copied(tmp_path, {"v1/core/block_pool.py": (PACKAGE / "v1/core/block_pool.py").read_text().replace(before, after)})
    assert named in refusal("0.32.1", Sources(tmp_path))
