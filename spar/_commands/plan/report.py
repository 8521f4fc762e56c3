# SPDX-License-Identifier: Apache-2.0
"""A plan as a table."""

from __future__ import annotations

from collections.abc import Sequence

from ..printing import count_text, size_text, table, time_text
from .layer import HYBRID, OF_DOCUMENTS, Layer
from .memory import USABLE, Use
from .model import Model
from .ways import Way, planned_ranks, recommended

HEADER = ("method", "layout", "rank", "forward", "backward", "step", "held", "activations", "work")

ROWS = {
    "parameters, gradients, Adam": "state",
    "gathered by FSDP2": "gathered",
    "embeddings, whole": "embeddings",
    "exchanges": "exchanges",
    "kept until backward": "kept",
    "a layer in backward": "layer",
    "logits": "logits",
    "peak": "peak",
}


def text_of(layer: Layer, ways: Sequence[Way], of_model: bool = False) -> str:
    parts = [_title(layer), _table(ways)]
    notes = [note for way in ways for note in way.notes]
    if remarks := [*_refused(ways), *dict.fromkeys(notes)]:
        parts.append("\n".join(remarks))
    best, why = recommended(ways)
    parts.append(f"recommended: {call_of(best, layer, of_model)}\n{why}")
    return "\n\n".join(parts)


def call_of(way: Way, layer: Layer, of_model: bool) -> str:
    """Return what a user writes for a way, in one's own code or for a model."""
    lengths = "lengths" if way.layout in OF_DOCUMENTS else layer.tokens
    method = "" if way.default and not (of_model and way.method == HYBRID) else f', method="{way.method}"'
    if of_model:
        layout = "" if way.layout in ("even", HYBRID) else f', layout="{way.layout}"'
        if way.layout in OF_DOCUMENTS:
            layout = f", layout=lambda _: spar.SequenceLayout.{way.layout}(lengths, group)"
        return f"spar.parallelize(model, group{layout}{method})"
    causal = ", causal=True" if layer.causal else ""
    mask = ", mask=spar.Spans.documents(ids)" if layer.mask(way.layout) is not None else ""
    window = f", window={layer.sides}" if layer.sides else ""
    layout = f"spar.SequenceLayout.{way.layout}({lengths})"
    return f"spar.attention(q, k, v, {layout}{causal}{mask}{window}{method})"


def memory_text(model: Model, layer: Layer, way: Way, used: Sequence[Use], shards: int, device: float) -> str:
    """Return the memory of a rank as a table with a column for each savings."""
    rows: list[Sequence[str]] = [("", *[use.name for use in used])]
    for text, name in ROWS.items():
        rows.append((text, *[size_text(getattr(use, name)) for use in used]))
    fits = ["yes" if use.peak <= USABLE * device else "no" for use in used]
    rows.append((f"fits in {USABLE:.0%} of {size_text(device)}", *fits))
    rows.append(("tokens that fit", *[f"{use.longest(layer.tokens, device):,}" for use in used]))
    title = f"memory of rank {way.tokens_rank}, which has the most tokens ({way.tokens:,} of a sequence), by "
    what = "parameters of the text model, the others are not counted" if model.is_part else "parameters"
    title += f"{way.method} over {way.layout}; {model.parameters / 1e9:.2f}e9 {what}, FSDP2 over "
    return f"{title}{count_text(shards, 'rank')}\n{table(rows, range(1, len(used) + 1))}"


def _title(layer: Layer) -> str:
    what = f"{layer.heads} heads, {layer.key_heads} key heads, width {layer.width}, {layer.dtype}"
    what = what.replace("torch.", "")
    pairs = "causal" if layer.causal else "not causal"
    pairs += "" if layer.window is None else f", window of {layer.window:,} keys"
    tokens = f"{layer.tokens:,} tokens"
    if layer.documents:
        tokens += f" in {count_text(len(layer.documents), 'document')} of {max(layer.documents):,} at most"
    tokens += f", batch {layer.batch}"
    lines = [f"{what}, {pairs}", f"{tokens}, on {count_text(layer.ranks, 'rank')}"]
    lines[1] += f"; {count_text(layer.layers, 'layer')}, hidden states of {layer.hidden:,}"
    if min(layer.ring, layer.ulysses) > 1:
        lines.append(f"hybrid: {layer.ring} ring ranks x {layer.ulysses} ulysses ranks")
    planned = planned_ranks(layer.ranks)
    if len(planned) < layer.ranks:
        lines.append(f"bytes: of the ranks {', '.join(map(str, planned))}")
    return "\n".join(lines)


def _table(ways: Sequence[Way]) -> str:
    has_times = any(way.seconds for way in ways)
    rows: list[Sequence[str]] = [(*HEADER, "time") if has_times else HEADER]
    for way in ways:
        name = f"{way.method}{' *' if way.default else ''}"
        if way.refused:
            rows.append((name, way.layout, *["-"] * (len(rows[0]) - 2)))
            continue
        sizes = way.forward, way.backward, way.step, way.held, way.activations
        time = (time_text(way.seconds),) if has_times else ()
        rows.append((name, way.layout, str(way.rank), *map(size_text, sizes), f"{way.work:.2f}", *time))
    unless = ", unless its ranks have measured speeds" if has_times else ""
    return f"{table(rows, range(2, len(rows[0])))}\n* what spar.attention chooses for the layout{unless}"


def _refused(ways: Sequence[Way]) -> list[str]:
    return [f"{way.method} over {way.layout} is not possible: {way.refused}" for way in ways if way.refused]
