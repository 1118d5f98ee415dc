"""One engine of a pair that prefills and decodes, in a process of its own: `Remote` asks by JSON lines, `main` answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

#: Every prompt is computed in one step: vLLM's ExampleConnector stores what the first chunk of a prompt has computed.
SERVES = dict(dtype="float32", max_model_len=1024, max_num_batched_tokens=4096, blocks=256)


class Remote:
    """An engine in a process of its own.

    Args:
        model: directory.
        role: `kv_role` of vLLM's ExampleConnector.
        storage: directory of the blocks that go from engine to engine.
        policy: None for stock vLLM, which an engine that only prefills is with a policy too.
    """

    def __init__(self, model, role, storage, policy=None):
        command = [sys.executable, __file__, str(model), role, str(storage), json.dumps(policy)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self, prompts, max_tokens):
        """Ask for answers, and wait for none."""
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()

    def ask(self, prompts, max_tokens):
        """(tokens, log-probabilities, evictions, tokens that it did not compute) of requests that run together."""
        self.begin(prompts, max_tokens)
        line = self._process.stdout.readline()
        assert line, f"the engine ended with {self._process.wait(60)}"
        return [tuple(answer) for answer in json.loads(line)]

    def holds(self):
        """Open files, threads and resident bytes of the process."""
        process = Path("/proc", str(self._process.pid))
        files, threads = (sum(1 for _ in (process / name).iterdir()) for name in ("fd", "task"))
        return files, threads, int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def kill(self):
        self._process.kill()
        self._process.wait()

    def end(self):
        self._process.stdin.close()
        self._process.wait(60)


def whole_blocks_and_some(ids):
    """Without its first token, if one token followed its whole blocks: ExampleConnector looks for another file then."""
    ids = list(map(int, ids))
    return ids[1:] if len(ids) % 32 == 1 else ids


def answers_of(server, prompts, **sampling):
    """The answers of an engine, as `Remote.ask` returns them."""
    from engine import logprobs_of

    outputs, traces = server.traced([(prompt, {"logprobs": 1, **sampling}) for prompt in prompts])
    return [
        (list(output.outputs[0].token_ids), logprobs_of(output).tolist(), trace.evicted, trace.start)
        for output, trace in zip(outputs, traces)
    ]


def main(model, role, storage, policy):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    import preparation

    preparation.prepare()
    from engine import Engine

    transfer = {"kv_connector": "ExampleConnector", "kv_role": role}
    transfer["kv_connector_extra_config"] = {"shared_storage_path": storage}
    server = Engine(Path(model), policy, **SERVES, kv_transfer_config=transfer, disable_hybrid_kv_cache_manager=True)
    for line in sys.stdin:
        asked = json.loads(line)
        found = answers_of(server, asked["prompts"], max_tokens=asked["max_tokens"])
        if policy is not None and role != "kv_producer":
            server.assert_nothing_left()
        server.drain()
        assert server.free_blocks == server.all_blocks and not server.scheduler.requests
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:4], json.loads(sys.argv[4]))
