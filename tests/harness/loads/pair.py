"""Random load on two engines, one that prefills and one that decodes under a policy; in turn one is killed and started.

    python tests/harness/loads/pair.py --requests 1000

Each engine is a process (disaggregated.py), and blocks go through files (vLLM's ExampleConnector). A *round* is a batch
of requests: one engine computes their prompts, the other one decodes. Every `--every` rounds one engine is killed while
it computes a batch. While it is gone the other one serves a batch: the engine that decodes computes its prompts itself.

After each batch these hold: tokens and evictions are those of one engine that served the batch alone, and
log-probabilities differ by less than 1e-3; every block is back in the pool, and no request is left. Open files and
threads of an engine are those of its third batch.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.path.remove(str(Path(__file__).parent))
    import preparation

    preparation.prepare()  # settings of vLLM that have to come first

import numpy as np
from disaggregated import SERVES, Remote, answers_of, whole_blocks_and_some
from engine import Engine

MODEL = Path(__file__).parents[3] / "examples" / "needle" / "model"
BASE = {"budget": 192, "buffer": 32, "sink": 32, "recent": 64, "allow": ["full"]}
TOGETHER, TOKENS = 8, 32
#: Tokens of a prompt: most of a shared prefix and of its own. All prompts of a batch fit into a step.
PREFIX, OWN = 160, 340


class Watched:
    """An engine of the pair, and what its process holds.

    Args:
        start: makes the `Remote`.

    Attributes:
        remote: the engine.
        grown: bytes by which the process has grown since its third batch.
    """

    def __init__(self, start):
        self._start = start
        self.begin_again()

    def begin_again(self):
        self.remote, self._rounds, self._held, self.grown = self._start(), 0, None, 0

    def ask(self, prompts, tokens):
        """Answers, after which the process has as many open files and threads as after its third batch."""
        answers = self.remote.ask(prompts, tokens)
        self._rounds += 1
        *held, resident = self.remote.holds()
        if self._rounds == 3:
            self._held = held, resident
        if self._rounds > 3:
            assert held == self._held[0], f"open files and threads: {held}, before {self._held[0]}"
            self.grown = resident - self._held[1]
        return answers


class Pair:
    """The two engines, and one that serves the same alone.

    Attributes:
        counts: what happened; `worst` is the largest difference of a log-probability, `grown` the most bytes by which a
            process has grown since its third batch.
    """

    def __init__(self, policy, storage):
        self._storage, self.counts = Path(storage), Counter()
        self.prefill = Watched(lambda: Remote(MODEL, "kv_producer", storage, policy))
        self.decode = Watched(lambda: Remote(MODEL, "kv_consumer", storage, policy))
        self._alone = Engine(MODEL, policy, **SERVES)

    def serve(self, prompts):
        """A round with both engines."""
        self.prefill.ask(prompts, 1)
        answers = self.decode.ask(prompts, TOKENS)
        for prompt, (*_, start) in zip(prompts, answers):
            assert start == (len(prompt) - 1) // 32 * 32, "the engine that decodes computed a part of the prompt"
        answers_of(self._alone, prompts, max_tokens=1, extra_args={"kv_policy": "full"})
        self._compare(prompts, answers)

    def kill(self, which, prompts, strangers):
        """Kill an engine that computes `prompts`; the other one serves `strangers`, and both serve `prompts` then."""
        engine, other = (self.prefill, self.decode) if which == "prefill" else (self.decode, self.prefill)
        if engine is self.decode:
            self.prefill.ask(prompts, 1)
        engine.remote.begin(prompts, 500)
        time.sleep(random.Random(str(prompts)).random())
        engine.remote.kill()
        self._forget()
        answers = other.ask(strangers, TOKENS if other is self.decode else 1)
        if other is self.decode:
            self._compare(strangers, answers)
        engine.begin_again()
        self._forget()
        self.counts[f"{which} killed"] += 1
        self.serve(prompts)

    def _compare(self, prompts, answers):
        singles = answers_of(self._alone, prompts, max_tokens=TOKENS)
        for answer, single in zip(answers, singles, strict=True):
            assert answer[0] == single[0] and answer[2] == single[2], "tokens or evictions differ"
            worst = np.abs(np.subtract(answer[1], single[1])).max()
            assert worst < 1e-3
            self.counts["worst"] = max(self.counts["worst"], worst)
        self.counts["grown"] = max(self.counts["grown"], self.prefill.grown, self.decode.grown)
        self.counts["requests"] += len(prompts)
        self.counts["evicted blocks"] += sum(len(step) for answer in answers for step in answer[2])
        self._alone.assert_nothing_left()
        self._alone.llm.reset_prefix_cache()
        self._forget()

    def _forget(self):
        """Remove the files: an engine that was killed may have written a part of them."""
        for path in self._storage.iterdir():
            shutil.rmtree(path)

    def close(self):
        self.prefill.remote.kill()
        self.decode.remote.kill()
        self._alone.close()


def prompts_of(rng):
    """Prompts of a batch; some share a prefix."""
    prefix, prompts = rng.choices(range(256), k=PREFIX), []
    for _ in range(TOGETHER):
        own = rng.choices(range(256), k=rng.randrange(OWN // 2, OWN))
        prompts.append(whole_blocks_and_some([*prefix[: rng.choice([0, 70, PREFIX])], *own]))
    return prompts


def run(policy, requests, every, seed=0):
    """Serve so many requests; every so many rounds one engine is killed, in turn. Returns what happened."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as storage:
        pair = Pair(policy, storage)
        try:
            while pair.counts["requests"] < requests:
                pair.counts["rounds"] += 1
                if pair.counts["rounds"] % every:
                    pair.serve(prompts_of(rng))
                else:
                    which = ("prefill", "decode")[pair.counts["rounds"] // every % 2]
                    pair.kill(which, prompts_of(rng), prompts_of(rng))
                if pair.counts["rounds"] % 10 == 0:
                    print(dict(pair.counts), flush=True)
        finally:
            pair.close()
    return pair.counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--every", type=int, default=10, help="rounds from one kill to the next")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begun = time.monotonic()
    counts = run({"name": options.policy, **BASE}, options.requests, options.every, options.seed)
    print(f"{os.path.basename(__file__)} {options.policy}: {dict(counts)}, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
