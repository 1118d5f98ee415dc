"""Runs kvpress in an environment of its own: prompts are compressed once they are computed, as its pipeline does it.

`load` has one static batch: all prompts are computed together, then all requests decode together. kvpress has no pool,
so nothing bounds its bytes. Presses keep as many tokens of a prompt as the budget of `h2o` in the same load; generated
tokens are added to them, except where a case says that it compresses while it decodes.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from common import Clock, Load, main, one_line

#: Presses that read attention weights, which only eager attention returns.
EAGER = ("ObservedAttention",)
#: Batches of one only, says its source.
SINGLE = ("KVzip",)
#: "none" keeps everything: transformers alone. Presses that are not here drop as many tokens of a prompt as SnapKV, by
#: other scores, so they decode as fast.
LOADS = ["none", "StreamingLLM", "SnapKV", "ObservedAttention", "KVzip", "DuoAttention", "TOVA, while decoding too"]
BFLOAT16 = ["none", "StreamingLLM", "SnapKV"]
FP8: list[str] = []  # it has no pool whose bytes could be equal
SERVED = ["none", "StreamingLLM", "SnapKV", "KeyDiff", "ObservedAttention", "DuoAttention"]
NEEDLES = [
    *("none", "StreamingLLM", "SnapKV", "SnapKV, its defaults", "TOVA", "KeyDiff", "Knorm", "ObservedAttention"),
    *("ExpectedAttention", "KVzip", "CriticalKV", "DuoAttention"),
]


def press_of(name: str, gone: float, spec: dict) -> Any:
    """A press.

    Args:
        name: in `LOADS` or `NEEDLES`.
        gone: share of a prompt's tokens that it drops.
        spec: of the cases; `sink`, `gates` and others.
    """
    import kvpress
    import numpy as np

    class Duo(kvpress.DuoAttentionPress):
        """With the gates of this model: those that it fetches are of other models."""

        @staticmethod
        def load_attention_pattern(model: Any) -> tuple:
            return spec["sink"], spec["recent"], np.array(spec["gates"])

    def snapkv() -> Any:
        return kvpress.SnapKVPress(gone, window_size=32, kernel_size=1)

    def tova_twice() -> Any:
        options = {"compression_interval": spec["block"], "target_size": spec["budget"], "hidden_states_buffer_size": 1}
        decoding = kvpress.DecodingPress(kvpress.TOVAPress(), **options)
        return kvpress.PrefillDecodingPress(kvpress.TOVAPress(gone), decoding)

    makers: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "StreamingLLM": lambda: kvpress.StreamingLLMPress(gone, spec["sink"]),
        "SnapKV": snapkv,
        "SnapKV, its defaults": lambda: kvpress.SnapKVPress(gone),
        "TOVA": lambda: kvpress.TOVAPress(gone),
        "TOVA, while decoding too": tova_twice,
        "KeyDiff": lambda: kvpress.KeyDiffPress(gone),
        "Knorm": lambda: kvpress.KnormPress(gone),
        "ObservedAttention": lambda: kvpress.ObservedAttentionPress(gone),
        "ExpectedAttention": lambda: kvpress.ExpectedAttentionPress(gone),
        "KVzip": lambda: kvpress.KVzipPress(gone, layerwise=True, n_sink=spec["sink"]),
        "CriticalKV": lambda: kvpress.CriticalKVPress(snapkv()),
        "DuoAttention": lambda: Duo(0.5),
    }
    return makers[name]()


class Model:
    """A model of transformers, and the most bytes that its cache took."""

    def __init__(self, path: str, name: str, dtype: str):
        import torch
        from transformers import AutoTokenizer, LlamaForCausalLM

        torch.set_grad_enabled(False)
        attention = "eager" if name in EAGER else "sdpa"
        options = {"attn_implementation": attention, "dtype": getattr(torch, dtype)}
        self.model = LlamaForCausalLM.from_pretrained(path, **options).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.peak = 0

    def start(self, press: Any, prompts: list[list[int]]) -> tuple[Any, Any]:
        """Computes and compresses prompts of equal length. Returns the cache, and the next tokens [n]."""
        import torch
        from transformers import DynamicCache

        cache, self.peak = DynamicCache(), 0
        # Before the press' own hooks, so that a layer counts with all of its keys.
        hooks = [
            layer.self_attn.register_forward_hook(lambda *_: self._measure(cache)) for layer in self.model.model.layers
        ]
        try:
            with press(self.model) if press else nullcontext():
                output = self.model(torch.tensor(prompts), past_key_values=cache, logits_to_keep=1)
        finally:
            for hook in hooks:
                hook.remove()
        return cache, output.logits[:, -1].argmax(-1)

    def step(self, cache: Any, tokens: Any, at: int) -> Any:
        """The next tokens [n] after `tokens` [n, k], whose first is at position `at`."""
        import torch

        places = torch.arange(at, at + tokens.shape[1])[None]
        output = self.model(tokens, past_key_values=cache, position_ids=places, logits_to_keep=1)
        self._measure(cache)
        return output.logits[:, -1].argmax(-1)

    def _measure(self, cache: Any) -> None:
        held = [x for layer in cache.layers for x in (layer.keys, layer.values) if x is not None]
        self.peak = max(self.peak, sum(x.nbytes for x in held))


def load(name: str, spec: dict) -> Iterator[Load]:
    model, prompts = Model(spec["model"], name, spec["dtype"]), spec["prompts"]
    question = spec.get("question", 0)
    gone, decodes = 1 - spec["budget"] / (len(prompts[0]) - question), "while decoding" in name
    _batch(model, press_of(name, gone, spec), spec["warm"][:1], spec["output"] // 8, decodes)
    for requests in spec["batches"]:
        if requests > 1 and name in SINGLE:
            continue
        row, clock = Load(name, requests, at_once=requests), Clock()
        press = press_of(name, gone, spec)
        first, outputs = _batch(model, press, prompts[:requests], spec["output"], decodes, question)
        clock.stop(row)
        row.first, row.peak_kv_bytes = requests * [first], model.peak
        row.keep(outputs, spec)
        yield row


def _batch(
    model: Model, press: Any, prompts: list[list[int]], output: int, decodes: bool, question: int = 0
) -> tuple[float, list[list[int]]]:
    """Seconds to the first tokens, and tokens of each request. The last `question` tokens are computed when what is
    before them is compressed, as kvpress' pipeline does it."""
    import torch

    clock, at = Clock(), len(prompts[0]) - question
    cache, tokens = model.start(press, [prompt[:at] for prompt in prompts])
    if question:
        tokens = model.step(cache, torch.tensor([prompt[at:] for prompt in prompts]), at)
    first, outputs = clock.seconds, [tokens]
    with press(model.model) if decodes else nullcontext():
        for count in range(output - 1):
            tokens = model.step(cache, tokens[:, None], at + question + count)
            outputs.append(tokens)
    return first, torch.stack(outputs, 1).tolist()


def needles(names: list[str], spec: dict) -> Iterator[dict[str, Any]]:
    for name in names:
        model = Model(spec["model"], name, spec["dtype"])
        for budget, tokens in spec["budgets"].items() if name not in ("none", "DuoAttention") else [(None, None)]:
            gone = 0.0 if tokens is None else 1 - tokens / spec["length"]
            row: dict[str, Any] = {"case": name, "setting": "agnostic", "budget": budget}
            try:
                yield row | {
                    "answers": [_answer(model, press_of(name, gone, spec), sample) for sample in spec["samples"]]
                }
            except Exception as error:  # a press' own refusal is a result
                yield row | {"error": one_line(error)}
                break


def _answer(model: Model, press: Any, sample: dict) -> str:
    import torch

    context, question, stop = sample["context"], sample["question"], model.model.generation_config.eos_token_id
    cache, _ = model.start(press, [context])
    at, answer = len(context), []
    tokens = torch.tensor([question])
    while len(answer) < sample["max_tokens"]:
        new = model.step(cache, tokens, at)
        answer.append(int(new))
        if answer[-1] == stop:
            break
        at, tokens = at + tokens.shape[1], new[:, None]
    return model.tokenizer.decode(answer, skip_special_tokens=True)


if __name__ == "__main__":
    main(load, needles, ("kvpress", "transformers", "torch"))
