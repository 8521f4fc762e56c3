# SPDX-License-Identifier: Apache-2.0
"""Draw the figures of docs/concepts.md: python docs/_site/figures.py writes docs/figures/*.svg.

A cell's colour and number are the rank that holds it. Each figure has a background of its own, so that it can
be read in a light and in a dark theme.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "figures"
WIDTH = 880
CELL = 30
STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; font-size: 14px }
.page { fill: #ffffff; stroke: #d0d7de } .plain { fill: #1f2328 } .faint { fill: #59636e; font-size: 13px }
.shape { fill: #1f2328; font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 13px }
.name { fill: #1f2328; font-weight: bold } .line { stroke: #59636e; stroke-width: 2 } .tip { fill: #59636e }
.cell { stroke: #59636e; stroke-width: 1 } .in { fill: #16191d; font-weight: bold }
.none { fill: #f1f3f5; stroke: #c9d1d9 }
.r0 { fill: #9ecae9 } .r1 { fill: #f6c78a } .r2 { fill: #a8dba8 } .r3 { fill: #e8b1d2 }
@media (prefers-color-scheme: dark) {
.page { fill: #1b1f24; stroke: #444c56 } .plain, .shape, .name { fill: #e6edf3 } .faint { fill: #a6b1bc }
.line { stroke: #a6b1bc } .tip { fill: #a6b1bc } .none { fill: #2a3038; stroke: #444c56 }
}
"""

Owner = Callable[[int, int], int | None]


class Figure:
    """An SVG of WIDTH; x and y are its pixels from the left and the top."""

    def __init__(self, name: str, height: int, description: str) -> None:
        self.name, self.height, self.description, self.parts = name, height, description, [""]

    def text(self, x: float, y: float, text: str, kind: str = "plain", anchor: str = "middle") -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def cell(self, x: float, y: float, rank: int | None, label: str | None = None, w: float = CELL) -> None:
        kind = "none" if rank is None else f"r{rank}"
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{CELL}" class="cell {kind}"/>')
        if rank is not None:
            self.text(x + w / 2, y + CELL / 2 + 5, str(rank) if label is None else label, "in")

    def grid(self, x: float, y: float, rows: int, columns: int, owner: Owner) -> None:
        for row in range(rows):
            for column in range(columns):
                self.cell(x + column * CELL, y + row * CELL, owner(row, column))

    def arrow(self, x: float, y: float, length: float, name: str, *shapes: str) -> None:
        """Draw an arrow to the right, with the operation above it and the shapes below."""
        end = x + length
        self.parts.append(f'<line x1="{x:g}" y1="{y:g}" x2="{end - 9:g}" y2="{y:g}" class="line"/>')
        self.parts.append(f'<path d="M{end:g} {y:g} l-10 -5 v10 z" class="tip"/>')
        self.text(x + length / 2, y - 10, name, "name")
        for line, shape in enumerate(shapes):
            self.text(x + length / 2, y + 20 + 18 * line, shape, "shape")

    def write(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img">'
            f"<title>{escape(self.description)}</title><style>{STYLE}</style>"
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.height - 1}" rx="8" class="page"/>'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def zigzag(chunk: int, ranks: int) -> int:
    return min(chunk, 2 * ranks - 1 - chunk)


def split_sizes(size: int, ranks: int) -> list[int]:
    return [size // ranks + (rank < size % ranks) for rank in range(ranks)]


def ulysses() -> Figure:
    figure = Figure("ulysses", 240, "Ulysses: two exchanges between shards of tokens and shards of heads")
    tops = ("own tokens, all heads", "all tokens, own heads", "own tokens, all heads")
    owners: tuple[Owner, ...] = (
        lambda row, column: column,
        lambda row, column: row,
        lambda row, column: column,
    )
    for step, (top, owner) in enumerate(zip(tops, owners, strict=True)):
        x = 50 + step * 330
        figure.text(x + 60, 35, top, "faint")
        figure.grid(x, 50, 4, 4, owner)
        figure.text(x + 60, 192, "tokens", "faint")
        figure.text(x - 10, 115, "H", "faint", "end")
    figure.text(440, 222, "attention of these heads, in any kernel", "plain")
    figure.arrow(180, 95, 180, "all_to_all(q, k, v)", "[B, S/P, H, D]", "→ [B, S, H/P, D]")
    figure.arrow(510, 95, 180, "all_to_all(y)", "[B, S, H/P, D]", "→ [B, S/P, H, D]")
    return figure


def gather() -> Figure:
    figure = Figure("gather", 250, "Gathered keys: each rank gathers the keys and values of all ranks")
    for x, owner in ((80, lambda r, c: c if r == c else None), (400, lambda r, c: c)):
        for rank in range(4):
            figure.text(x - 10, 70 + rank * CELL, f"rank {rank}", "faint", "end")
        figure.grid(x, 50, 4, 4, owner)
        figure.text(x + 60, 192, "tokens of K and V", "faint")
    figure.arrow(215, 95, 125, "all_gather(k, v)", "[B, S/P, K, D]", "→ [B, S, K, D]")
    figure.text(690, 35, "scores: queries x keys", "faint")
    figure.grid(630, 50, 4, 4, lambda row, column: row)
    figure.text(690, 192, "keys", "faint")
    figure.text(622, 115, "queries", "faint", "end")
    figure.arrow(530, 95, 40, "")
    figure.text(
        440,
        225,
        "backward: reduce_scatter sums the gradients that all ranks' queries have for a key",
        "plain",
    )
    return figure


def ring() -> Figure:
    figure = Figure("ring", 290, "Ring: shards of keys and values go round the ranks, step by step")
    for step in range(4):
        x = 85 + step * 205
        figure.text(x + 35, 35, f"step {step}", "name")
        for rank in range(4):
            if step == 0:
                figure.text(x - 10, 70 + rank * 40, f"rank {rank}", "faint", "end")
            shard = (rank - step) % 4
            figure.cell(x, 50 + rank * 40, shard, f"K, V {shard}", 70)
        if step < 3:
            figure.arrow(x + 80, 85, 115, f"from rank - {step + 1}", "[B, S/P, K, D]", "of K and V")
    figure.text(440, 235, "at each step: own queries [B, S/P, H, D] to the shard of this step;", "plain")
    figure.text(
        440, 256, "blocks are merged by their log-sum-exp, while the next shard is in flight", "plain"
    )
    figure.text(
        440, 277, "backward: the shards go round again, their gradients go back to their owners", "faint"
    )
    return figure


def hybrid() -> Figure:
    figure = Figure(
        "hybrid", 340, "Hybrid: Ulysses inside the ulysses groups, a ring across them, on 2 x 2 ranks"
    )
    chunks = {0: (0,), 1: (1,), 2: (3,), 3: (2,)}  # of each rank's tokens, out of 4
    ring_chunks = ((0, 3), (1, 2))
    panels = ("shards of tokens", "Ulysses: [0, 2] and [1, 3]", "ring: [0, 1] and [2, 3]")
    for panel, title in enumerate(panels):
        for rank in range(4):
            ring_rank, ulysses_rank = rank % 2, rank // 2
            x, y = 20 + panel * 295 + ring_rank * 125, 60 + ulysses_rank * 110

            def owner(row: int, column: int, panel: int = panel, rank: int = rank) -> int | None:
                if panel == 0:
                    return rank if column in chunks[rank] else None
                if row != rank // 2:
                    return None
                own = column in ring_chunks[rank % 2]
                return rank if own else (rank ^ 1 if panel == 2 else None)

            figure.text(x + 2, y - 6, f"rank {rank}", "faint", "start")
            figure.grid(x, y, 2, 4, owner)
        figure.text(20 + panel * 295 + 122, 28, title, "name")
    figure.text(142, 262, "[B, S/(R U), H, D]", "shape")
    figure.text(437, 262, "[B, S/R, H/U, D]", "shape")
    figure.text(732, 262, "K, V [B, S/R, K/U, D]", "shape")
    for x in (270, 565):
        figure.arrow(x, 150, 40, "")
    figure.text(440, 296, "4 chunks of tokens by 2 heads; R = 2 ring ranks, U = 2 ulysses ranks", "faint")
    figure.text(
        440, 318, "rank = ulysses rank x R + ring rank; the ring ranks hold chunks 0 and 3, 1 and 2", "faint"
    )
    return figure


def zigzags() -> Figure:
    figure = Figure(
        "zigzag", 420, "Zigzag: two chunks for each rank, so that all have equal work under a causal mask"
    )
    figure.text(20, 30, "sequence, 8 chunks on 4 ranks", "faint", "start")
    for chunk in range(8):
        figure.cell(20 + chunk * CELL, 40, zigzag(chunk, 4))
    figure.arrow(275, 55, 190, "layout.shard(x, 1)", "[B, S, ...] → [B, S/P, ...]")
    for rank in range(4):
        x = 490 + rank * 95
        figure.text(x + CELL, 30, f"rank {rank}", "faint")
        for place, chunk in enumerate((rank, 7 - rank)):
            figure.cell(x + place * CELL, 40, rank, str(chunk))
    kinds: tuple[tuple[int, str, Callable[[int], int]], ...] = (
        (120, "even", lambda chunk: chunk // 2),
        (530, "zigzag", lambda chunk: zigzag(chunk, 4)),
    )
    for x, name, of in kinds:
        figure.text(x + 120, 120, f"{name}: causal scores, queries x keys", "name")
        figure.grid(x, 132, 8, 8, lambda row, column, of=of: of(row) if column <= row else None)
        work = [sum(chunk + 0.5 for chunk in range(8) if of(chunk) == rank) / 32 for rank in range(4)]
        shares = ", ".join(f"{part:.0%}" for part in work)
        figure.text(x + 120, 398, f"work of ranks 0 to 3: {shares}", "plain")
    return figure


def packed() -> Figure:
    figure = Figure("packed", 205, "Packed: each rank holds a part of each document")
    documents = {"a": 6, "b": 3, "c": 5}
    held: list[list[str]] = [[], [], []]
    x = 20
    for name, length in documents.items():
        figure.text(x + length * CELL / 2, 30, f"document {name}: {length}", "faint")
        place = 0
        for rank, size in enumerate(split_sizes(length, 3)):
            for _ in range(size):
                label = f"{name}{place}"
                held[rank].append(label)
                figure.cell(x + place * CELL, 40, rank, label)
                place += 1
        x += length * CELL + 10
    figure.arrow(475, 55, 195, "layout.shard(x, 1)", "[B, 14, H, D]", "→ [B, 5 | 5 | 4, H, D]")
    for rank, labels in enumerate(held):
        figure.text(700, 30 + 54 * rank, f"rank {rank}", "faint", "start")
        for place, label in enumerate(labels):
            figure.cell(700 + place * CELL, 37 + 54 * rank, rank, label)
    figure.text(20, 130, "positions() restart in each document: rank 1 has 2, 3, 1, 2, 3", "plain", "start")
    figure.text(
        20, 156, "attention: a token attends to its own document, without a mask or padding", "plain", "start"
    )
    figure.text(20, 182, "gather: one exchange, into natural order", "plain", "start")
    return figure


FIGURES = (ulysses, gather, ring, hybrid, zigzags, packed)

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in FIGURES:
        figure = draw()
        (FOLDER / f"{figure.name}.svg").write_text(figure.write())
