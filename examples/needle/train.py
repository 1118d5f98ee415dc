"""Trains the needle model from its hand-built weights, on documents of data.py.

    python train.py --out model                      # CPU or GPU; the same command resumes a stopped run
    python train.py --out model --stages 128x32x150,512x8x350
    python train.py --out second --tasks aggregates --start first --seed 1      # goes on from a trained model

A stage is length x batch x steps: short documents first. The documents of a step depend only on the seed and the number
of the step, so a resumed run gives the same result.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from data import MIXTURES, Documents, build_tokenizer, training_batch
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaForCausalLM

from build import build, fixed  # isort: skip

STAGES = "128x32x150,512x8x350,1024x4x200,2048x2x100,4096x1x80"


def schedule(stages: str) -> list[tuple[int, int]]:
    """'128x32x150,...' -> the (length, batch) of each step."""
    parsed = [tuple(map(int, stage.split("x"))) for stage in stages.split(",")]
    return [(length, batch) for length, batch, steps in parsed for _ in range(steps)]


def learning_rate(step: int, total: int, peak: float, warmup: int = 50, decay: float = 0.4) -> float:
    """Linear warm-up, a plateau, and a linear decay to a twentieth over the last `decay` of the steps."""
    return peak * min((step + 1) / warmup, 1.0, max(0.05, (total - step) / (decay * total)))


def losses(model: LlamaForCausalLM, ids: torch.Tensor, answer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ids, answer [batch, length] -> mean loss on the assistant's tokens, and on all other text."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    loss, said = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"), answer[:, 1:].flatten()
    return loss[said].sum() / said.sum().clamp(min=1), loss[~said].mean()


def save_model(model: LlamaForCausalLM, tokenizer, out: Path, dtype: torch.dtype) -> None:
    """Write a model directory; the weights that are trained stay in float32."""
    state = {name: weight.to(dtype).contiguous() for name, weight in model.state_dict().items()}
    model.save_pretrained(out, state_dict=state)
    config = type(model.config).from_pretrained(out, dtype=dtype)
    config.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Train, with a progress bar; the state is kept beside the model, in <out>.state.pt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--tasks", default="needles", choices=MIXTURES, help="what it learns")
    parser.add_argument("--start", type=Path, help="a trained model instead of the hand-built weights")
    parser.add_argument("--stages", default=STAGES)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--decay", type=float, default=0.4, help="share of the steps in which the rate falls")
    parser.add_argument("--text-weight", type=float, default=0.5, help="weight of the loss on text that is no answer")
    parser.add_argument("--alternate", action="store_true", help="every other step in float32, not in bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=float, default=120, help="seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0: as PyTorch chooses")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    start = args.start and LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    model = (start or build(args.seed, kind=args.tasks)).to(args.device)
    tokenizer = build_tokenizer(model.config.max_position_embeddings, MIXTURES[args.tasks][1])
    docs, plan = Documents(tokenizer), schedule(args.stages)
    unchanged = fixed(model, args.tasks)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    state, first, seconds = Path(f"{args.out}.state.pt"), 0, 0.0
    if state.exists():
        saved = torch.load(state, map_location=args.device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, seconds = saved["step"], saved["seconds"]

    started = saved_at = time.monotonic()
    bar = tqdm(range(first, len(plan)), initial=first, total=len(plan), unit="step")
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(plan), args.lr, decay=args.decay)
        length, batch = plan[step]
        rows = training_batch(docs, np.random.default_rng([args.seed, step]), batch, length, args.tasks)
        ids, answer = (torch.from_numpy(x).to(args.device) for x in rows)
        with torch.autocast(args.device, torch.bfloat16, enabled=not (args.alternate and step % 2)):
            said, text = losses(model, ids, answer)
        optimizer.zero_grad()
        (said + args.text_weight * text).backward()
        for weight, part in unchanged:
            weight.grad[part] = 0
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bar.set_postfix(length=length, answers=f"{said.item():.3f}", text=f"{text.item():.3f}")
        now = time.monotonic()
        if now - saved_at > args.save_every or step + 1 == len(plan):
            saved_at, spent = now, seconds + now - started
            weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(weights | {"step": step + 1, "seconds": spent}, state.with_suffix(".tmp"))
            state.with_suffix(".tmp").replace(state)
            save_model(model, tokenizer, args.out, torch.bfloat16)
    print(f"trained in {seconds + time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
