"""Draws the pictures of README and docs/architecture.md into docs/pictures, as SVG.

python scripts/pictures.py
"""

from html import escape
from pathlib import Path

OUT = Path(__file__).parent.parent / "docs" / "pictures"
SINK, KEPT, RECENT, HOLE, FREE = "#7fb3d5", "#82c99a", "#f0b775", "#ffffff", "#e3e6ea"
LINE, INK, FAINT = "#44505c", "#1c242c", "#66727e"
FONT = "font-family='Helvetica, Arial, sans-serif'"


class Picture:
    """An SVG on a white card, readable on a dark page too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' "
            f"aria-label='{escape(title, quote=True)}'>",
            f"<title>{escape(title)}</title>",
            "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
            f"orient='auto'><path d='M0 0 8 4 0 8z' fill='{LINE}'/></marker></defs>",
            f"<rect x='1' y='1' width='{width - 2}' height='{height - 2}' rx='10' fill='#fff' stroke='#d5dae0'/>",
        ]

    def box(
        self, x: float, y: float, text: str = "", fill: str = HOLE, width: float = 48, dashed: bool = False
    ) -> None:
        dash = " stroke-dasharray='4 3'" if dashed else ""
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='34' rx='4' fill='{fill}' stroke='{LINE}'{dash}/>"
        )
        if text:
            self.text(x + width / 2, y + 22, text, 14, "middle", FAINT if dashed else INK)

    def text(self, x: float, y: float, text: str, size: int = 14, anchor: str = "start", fill: str = INK) -> None:
        self.parts.append(
            f"<text x='{x}' y='{y}' {FONT} font-size='{size}' text-anchor='{anchor}' fill='{fill}'>"
            f"{escape(text)}</text>"
        )

    def arrow(self, *points: tuple[float, float], width: float = 1.3) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(
            f"<polyline points='{path}' fill='none' stroke='{LINE}' stroke-width='{width}' marker-end='url(#tip)'/>"
        )

    def line(self, points: list[tuple[float, float]], color: str, width: float = 2.4, dashed: bool = False) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = " stroke-dasharray='6 4'" if dashed else ""
        self.parts.append(f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='{width}'{dash}/>")

    def save(self, name: str) -> None:
        OUT.mkdir(exist_ok=True)
        (OUT / name).write_text("\n".join([*self.parts, "</svg>"]) + "\n")


def holes_and_view() -> None:
    """Draw a block table with holes, its view, and the pool that got the evicted blocks."""
    picture = Picture(884, 336, "Evicted blocks are holes in the block table; attention reads a view without them")
    table = [17, 4, 29, 8, 33, 12, 21, 6, 40, 15]
    fill = [SINK, KEPT, KEPT, KEPT, KEPT, KEPT, KEPT, KEPT, RECENT, RECENT]
    holes = (2, 3, 5, 6)
    at = [150 + 56 * i for i in range(10)]
    picture.text(24, 40, "logical block", 13, fill=FAINT)
    for i, x in enumerate(at):
        picture.text(x + 24, 40, str(i), 13, "middle", FAINT)
    picture.text(24, 76, "block table")
    picture.text(24, 93, "before", 13, fill=FAINT)
    picture.text(24, 150, "block table")
    picture.text(24, 167, "after eviction", 13, fill=FAINT)
    picture.text(24, 252, "view")
    picture.text(24, 269, "attention reads this", 12, fill=FAINT)
    for i, x in enumerate(at):
        picture.box(x, 58, str(table[i]), fill[i])
        picture.box(x, 132, "0" if i in holes else str(table[i]), HOLE if i in holes else fill[i], dashed=i in holes)
    kept = [i for i in range(10) if i not in holes]
    for place, i in enumerate(kept):
        picture.box(at[place], 234, str(table[i]), fill[i])
        picture.arrow((at[i] + 24, 170), (at[place] + 24, 230))
    picture.text(at[6] + 4, 256, "length: 6 blocks instead of 10", 13)
    picture.arrow((at[9] + 48, 149), (740, 149))
    picture.text(744, 146, "next token goes to", 12, fill=FAINT)
    picture.text(744, 162, "table[pos // size]", 12)
    picture.box(744, 234, "29", FREE, 40)
    picture.box(790, 234, "8", FREE, 40)
    picture.box(744, 274, "12", FREE, 40)
    picture.box(790, 274, "21", FREE, 40)
    picture.text(787, 226, "free in the pool", 12, "middle", FAINT)
    for x, color, text in ((150, SINK, "sink"), (232, KEPT, "kept by its score"), (392, RECENT, "recent")):
        picture.box(x, 290, fill=color, width=24)
        picture.text(x + 32, 312, text, 13)
    picture.box(484, 290, "0", width=24, dashed=True)
    picture.text(516, 312, "hole: vLLM's null block", 13)
    picture.save("holes-and-view.svg")


def residency() -> None:
    """Draw the blocks of a request over time, with and without a policy. A sketch, not measured."""
    picture = Picture(860, 320, "Blocks that one request holds as it runs")
    left, bottom, right, top = 80, 260, 640, 40
    picture.arrow((left, bottom), (left, top - 10))
    picture.arrow((left, bottom), (right + 10, bottom))
    picture.text(left - 10, top - 16, "blocks held", 13, fill=FAINT)
    picture.text(right + 14, bottom + 5, "time", 13, fill=FAINT)
    scale = lambda step, blocks: (left + step * 5.2, bottom - blocks * 2.0)  # noqa: E731
    budget, trigger = 36, 46
    held, blocks = [], 0.0
    for step in range(106):
        blocks = 3.2 * step if step < 10 else blocks + 0.75
        if blocks > trigger:
            held.append(scale(step, blocks))
            blocks = budget
        held.append(scale(step, blocks))
    stock = [scale(step, 3.2 * step if step < 10 else 28.8 + (step - 9) * 0.75) for step in range(106)]
    for level, text in ((budget, "budget"), (trigger, "trigger = budget + buffer")):
        picture.line([scale(0, level), scale(107, level)], "#b3bac2", 1.2, dashed=True)
        picture.text(right + 14, scale(0, level)[1] + 5, text, 13)
    picture.line(stock, "#9b59b6")
    picture.line(held, "#2e86c1")
    picture.text(right + 14, stock[-1][1] + 5, "stock vLLM: all of it", 13, fill="#9b59b6")
    picture.text(
        scale(50, 0)[0], scale(0, 22)[1], "with a policy: back to the budget at each decision", 13, fill="#2e86c1"
    )
    picture.text(scale(4, 0)[0] + 14, bottom + 22, "prompt, chunk by chunk", 12, "middle", FAINT)
    picture.text(scale(60, 0)[0], bottom + 22, "decoding", 12, "middle", FAINT)
    picture.text(scale(60, 0)[0], bottom + 44, "a sketch, not measured", 11, "middle", FAINT)
    picture.save("residency.svg")


def compaction() -> None:
    """Draw token granularity: kept tokens of two heads move from four blocks into two."""
    picture = Picture(890, 262, "With token granularity each head gathers its kept tokens into the same blocks")
    for row, (head, kept) in enumerate(
        (("KV head 0", (0, 3, 4, 7, 9, 10, 13, 15)), ("KV head 1", (1, 2, 5, 6, 8, 11, 12, 14)))
    ):
        y = 60 + row * 66
        picture.text(24, y + 22, head)
        for token in range(16):
            x = 120 + token * 26 + token // 4 * 12
            picture.box(x, y, str(token), KEPT if token in kept else HOLE, 24, dashed=token not in kept)
        picture.arrow((590, y + 17), (628, y + 17))
        for place, token in enumerate(kept):
            x = 636 + place * 26 + place // 4 * 12
            picture.box(x, y, str(token), KEPT, 24)
    for block in range(4):
        picture.text(120 + block * 116 + 51, 46, f"block {block}", 13, "middle", FAINT)
    picture.text(636 + 51, 46, "block 0", 13, "middle", FAINT)
    picture.text(636 + 116 + 51, 46, "block 1", 13, "middle", FAINT)
    picture.text(24, 206, "All heads keep the same number of tokens, so one block table serves all heads.", 13)
    picture.text(
        24,
        230,
        "Blocks 2 and 3 become holes and go back to the pool. Positions do not move: keys carry their rotation.",
        13,
    )
    picture.save("compaction.svg")


def plan_and_report() -> None:
    """Draw one step: what scheduler and worker do, and what travels between them."""
    picture = Picture(884, 416, "A step: the plan goes to the worker, and the report comes back")
    scheduler, worker = 190, 690
    for x, name in ((scheduler, "scheduler"), (worker, "worker")):
        picture.box(x - 70, 20, name, KEPT, 140)
        picture.line([(x, 54), (x, 374)], "#b3bac2", 1.2, dashed=True)
    for x, y, text, width in (
        (scheduler, 70, "schedule: vLLM plans the step", 240),
        (worker, 156, "write holes into tables, build views", 280),
        (worker, 200, "run the model, add scores to running sums", 310),
        (scheduler, 288, "decide: evict the least important blocks", 310),
        (scheduler, 332, "free them, note new holes", 240),
    ):
        picture.box(x - width / 2, y, text, width=width)
    picture.arrow((scheduler, 132), (worker, 132))
    picture.text((scheduler + worker) / 2, 124, "SchedulerOutput + plan", 14, "middle")
    picture.text((scheduler + worker) / 2, 149, "new holes, requests to measure,", 12, "middle", FAINT)
    picture.text((scheduler + worker) / 2, 165, "requests to report", 12, "middle", FAINT)
    picture.arrow((worker, 264), (scheduler, 264))
    picture.text((scheduler + worker) / 2, 256, "ModelRunnerOutput + report", 14, "middle")
    picture.text((scheduler + worker) / 2, 281, "scores of the requests that the plan asked for", 12, "middle", FAINT)
    picture.text(scheduler, 394, "holes travel with the next plan", 12, "middle", FAINT)
    picture.save("plan-and-report.svg")


def parts() -> None:
    """Draw the folders of the code, from policies to vLLM."""
    picture = Picture(884, 130, "Where the code is: policies, core, compute, integration")
    for i, (folder, does, more) in enumerate(
        (
            ("policies", "what a block is worth", ""),
            ("core", "decide: blocks, mechanisms,", "actions"),
            ("compute", "measure and move: sums, views;", "kernels: triton_kernels, csrc"),
            ("integration", "every import of vLLM", ""),
        )
    ):
        x = 24 + 216 * i
        picture.box(x, 24, folder, KEPT, 188)
        picture.text(x + 94, 82, does, 13, "middle", FAINT)
        picture.text(x + 94, 100, more, 13, "middle", FAINT)
        if i:
            picture.arrow((x - 28, 41), (x - 3, 41))
    picture.save("parts.svg")


def main() -> None:
    for draw in (holes_and_view, residency, compaction, plan_and_report, parts):
        draw()


if __name__ == "__main__":
    main()
