"""Soaks a real server.

python tests/harness/soak --minutes 10                   # rounds of load, each second one under a fault
python tests/harness/soak --minutes 10 --stock           # the same load on stock vLLM
python tests/harness/soak --ends                         # servers that end while they answer, beside stock vLLM
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])
import preparation  # noqa: E402, F401  (settings of vLLM that have to come first)
from oracle.tiny import make_tiny_llama  # noqa: E402

from soak.clients import Load  # noqa: E402
from soak.deaths import ROOM, WAYS, die  # noqa: E402
from soak.rounds import check, soak  # noqa: E402
from soak.server import POLICY, Server  # noqa: E402

#: Faults of successive rounds, repeated.
FAULTS = ("", "lost", "", "late", "", "doubled")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--requests", type=int, default=300, help="of each round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", type=json.loads, default=POLICY, help="of the server, a JSON object")
    parser.add_argument("--stock", action="store_true", help="no policy")
    parser.add_argument("--ends", action="store_true", help="end servers in the middle of their work")
    parser.add_argument("--way", choices=[*WAYS, "plan dropped", "disk full"], help="of ending them; all if left out")
    parser.add_argument("--out", default="out/soak")
    options = parser.parse_args()
    folder = Path(options.out)
    model = make_tiny_llama(folder / "model")
    if options.ends:
        return ends(model, folder, options.way)
    policy = None if options.stock else options.policy
    with Server(model, policy, folder / "server") as server:
        load = Load(server, options.seed, policies=policy is not None)
        load.ask_quietly()
        until = time.monotonic() + 60 * options.minutes
        faults = itertools.takewhile(lambda _: time.monotonic() < until, itertools.cycle(FAULTS))
        found = soak(server, load, faults, options.requests, lambda line: print(line, flush=True))
        print(dict(load.counts))
        print({name: held.get("struck") for name, held in found[-1].books.items()})
        check(load, found)
        # Before the server ends: vLLM logs a traceback then, with a policy and without.
        assert "Traceback" not in server.log, server.log_path
    print("all of it held")
    return 0


def ends(model, folder, only):
    """Print how servers end, with a policy and without."""
    for way in (*WAYS, "plan dropped", "disk full"):
        for policy in (POLICY, None):
            # Stock vLLM has no plans.
            if only not in (None, way) or (way == "plan dropped" and policy is None):
                continue
            if way == "disk full":
                what = f"disk full: {disk_full(model, policy, folder)}"
            else:
                what = die(Server(model, policy, folder / "ends", ROOM).start(), way)
            print("h2o  " if policy else "stock", what, flush=True)
    return 0


def disk_full(model, policy, folder):
    """Start a server whose caches of compiled code lie on a full disk, and ask it. Mounts a disk, which takes root."""
    disk = folder / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=True)
    try:
        with contextlib.suppress(OSError):
            (disk / "full").write_bytes(b"x" * (64 << 10))
        names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
        server = Server(model, policy, folder / "ends", settings={name: str(disk / "cache") for name in names})
        try:
            with server:
                load = Load(server, policies=policy is not None)
                load.ask_quietly()
                return f"starts and gives {len(load.answers)} answers"
        except (AssertionError, KeyError) as error:
            return f"{type(error).__name__}: {str(error)[-300:]}"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


if __name__ == "__main__":
    sys.exit(main())
