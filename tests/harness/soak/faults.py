"""A general plugin of vLLM that injects faults into a server and shows its books. The product contains none of it.

`environment` writes the metadata of a package whose entry point is `register`. vLLM loads it in each of its processes.
The control file names the fault. It is read before each step and may change while the server runs.

| fault | what happens |
|---|---|
| `lost` | a step's reports do not arrive |
| `late` | a step's reports arrive with the next step's output |
| `doubled` | a step's reports arrive with its own and with the next step's output |
| `raises` | a worker raises while it makes a report; a stock worker, while it executes a step |
| `plan` | a step reaches the worker without its plan |

On SIGUSR1 a process writes its books to `<pid>.json` in the folder of the control file.
"""

import gc
import json
import os
import signal
import sys
from collections import Counter
from copy import copy
from pathlib import Path

from vllm_evict.core.plan import PLAN, REPORTS

CONTROL = "VLLM_EVICT_SOAK_CONTROL"
#: A fault strikes each time it has been asked for so often.
EVERY = 2


def environment(folder):
    """Environment variables with which a server loads this plugin.

    Args:
        folder: for the control file and books.
    """
    folder = Path(folder)
    package = folder / "package" / "vllm_evict_soak-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-evict-soak\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[vllm.general_plugins]\nvllm_evict_soak = soak.faults:register\n")
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, str(package.parent), os.environ.get("PYTHONPATH", "")])
    return {CONTROL: str(folder / "fault"), "PYTHONPATH": path}


class Fault:
    """The fault that the control file names, and how often each fault has struck."""

    def __init__(self, control):
        self.control, self.seen, self.name = Path(control), None, ""
        self.struck, self._asked = {}, 0

    def strikes(self, name):
        """Whether this fault strikes now."""
        try:
            changed = self.control.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        if changed != self.seen:
            self.seen, self.name = changed, self.control.read_text()
        if self.name != name:
            return False
        self._asked += 1
        if self._asked % EVERY:
            return False
        self.struck[name] = self.struck.get(name, 0) + 1
        return True


def register():
    """Entry point `vllm.general_plugins`."""
    if CONTROL not in os.environ or getattr(register, "done", False):
        return
    register.done = True
    from vllm_evict.integration.start.late import when_imported

    fault = Fault(os.environ[CONTROL])
    when_imported("vllm_evict.integration.engine.scheduler", lambda module: _break_scheduler(module, fault))
    when_imported("vllm_evict.compute.group", lambda module: _break_worker(module.GroupRuntime, fault))
    when_imported("vllm_evict.compute.runtime", lambda module: _show_worker(module.EvictionRuntime, fault))
    when_imported("vllm.v1.engine.core", lambda module: _show_core(module.EngineCoreProc, fault))
    when_imported("vllm.v1.worker.cpu_worker", lambda module: _break_stock(module.CPUWorker, fault))
    if "vllm.entrypoints" in sys.modules and "vllm.v1.engine.core" not in sys.modules:
        _on_signal(lambda: {})


def _break_scheduler(module, fault):
    mixin, reports, plan = module.EvictionMixin, REPORTS, PLAN
    update, schedule = mixin.update_from_output, mixin.schedule
    kept = []

    def update_from_output(self, scheduler_output, model_runner_output):
        found, late, missed = getattr(model_runner_output, reports, None), kept[:], []
        kept.clear()
        if found:
            if fault.strikes("lost"):
                found, missed = None, found
            elif fault.strikes("late"):
                kept.append(found)
                found, missed = None, found
            elif fault.strikes("doubled"):
                kept.append(found)
        for older in late:
            found = [{**old, **new} for old, new in zip(older, found or [{}] * len(older))]
        if found is not getattr(model_runner_output, reports, None):
            model_runner_output = copy(model_runner_output)
            setattr(model_runner_output, reports, found)
        outputs = update(self, scheduler_output, model_runner_output)
        # The report of a request that ends with this step is not missed.
        if any(self.running_request(req_id) for group in missed for req_id in group):
            fault.struck["missed"] = fault.struck.get("missed", 0) + 1
        return outputs

    def broken_schedule(self, *args, **kwargs):
        output = schedule(self, *args, **kwargs)
        if any(group.changes for group in getattr(output, plan).groups) and fault.strikes("plan"):
            delattr(output, plan)
        return output

    mixin.update_from_output, mixin.schedule = update_from_output, broken_schedule


def _break_worker(runtime, fault):
    end = runtime.end

    def broken(self, *args, **kwargs):
        reports = end(self, *args, **kwargs)
        if reports and fault.strikes("raises"):
            raise RuntimeError("injected: a worker raises while it reports")
        return reports

    runtime.end = broken


def _show_worker(runtime, fault):
    begin, seen = runtime.begin, []

    def shown(self, *args, **kwargs):
        if not seen:
            seen.append(self)
            _on_signal(lambda: {"struck": fault.struck, **worker_books(self)})
        return begin(self, *args, **kwargs)

    runtime.begin = shown


def _break_stock(worker, fault):
    """Break vLLM's own worker, not the plugin's, which is a subclass."""
    execute, seen = worker.execute_model, []

    def broken(self, *args, **kwargs):
        if type(self) is worker and not seen:
            seen.append(self)
            _on_signal(lambda: {"struck": fault.struck})
        output = execute(self, *args, **kwargs)
        if type(self) is worker and fault.strikes("raises"):
            raise RuntimeError("injected: a worker raises")
        return output

    worker.execute_model = broken


def _show_core(core, fault):
    loop = core.run_busy_loop

    def shown(self, *args, **kwargs):
        _on_signal(lambda: {"struck": fault.struck, **books(self)})
        return loop(self, *args, **kwargs)

    core.run_busy_loop = shown


def _on_signal(held):
    def write(*_):
        gc.collect()
        path = Path(os.environ[CONTROL]).parent / f"{os.getpid()}.json"
        types = Counter(type(each).__name__ for each in gc.get_objects())
        path.with_suffix(".new").write_text(json.dumps({"types": types, **held()}))
        path.with_suffix(".new").rename(path)

    signal.signal(signal.SIGUSR1, write)


def books(core):
    """Return the size of a scheduler's memory of requests: name -> how many. All are 0 on an idle server.

    "in use" counts blocks that are not free, without the null block.
    """
    scheduler = core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    found = {
        "requests": len(scheduler.requests),
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting) + len(scheduler.kv_holding_waiting),
        "in use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "referenced": sum(block.ref_cnt != 0 for block in pool.blocks if not block.is_null),
        "tables": sum(len(manager.req_to_blocks) for manager in managers),
        "published": sum(len(manager.num_cached_block) for manager in managers),
    }
    evictable = getattr(scheduler, "kv_managers", [])
    if not evictable:
        return {"books": found}
    found["residents"] = sum(len(manager.residents) for manager in evictable)
    found["held"] = sum(sum(manager.held.values()) for manager in evictable)
    found["over trigger"] = sum(len(manager._over_trigger) for manager in evictable)
    found["stoppable"] = len(scheduler.usages._stoppable)
    found["plan"] = sum(len(group.track) for group in scheduler._plan.groups)
    found["plan"] += sum(len(manager.changes) for manager in evictable)
    from vllm_evict.features.kvzip.engine import Reconstructions  # vLLM is imported by now

    for reconstructions in scheduler.mechanisms.of(Reconstructions):
        found["prompts known"] = len(reconstructions.scores._prompts)
    return {"books": found}


def worker_books(runtime):
    """Return the size of a worker's memory of requests: name -> how many. All are 0 on an idle server that has heard of
    the last request's end.
    """
    found = {"with holes": 0, "mergers": 0, "sums": 0}
    for group in runtime.groups:
        found["with holes"] += len(group.with_holes)
        for part in (*group.probes, *group.movers):
            found["mergers"] += len(getattr(part, "mergers", ()))
            found["sums"] += len(getattr(part, "sums", ()))
    return {"books": found}
