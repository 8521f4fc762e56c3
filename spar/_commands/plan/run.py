# SPDX-License-Identifier: Apache-2.0
"""`python -m spar plan`: what each method and layout costs, and which one to take."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import asdict

import torch

from ..._control.speeds import Speeds, read
from ..printing import GIB, progress
from ..ranks import UsageError, add_device_arguments, squarest
from . import measure
from .config import read_model
from .layer import Layer, drawn_documents
from .memory import uses
from .model import Model
from .report import call_of, memory_text, text_of
from .ways import Way, evaluate, planned_ranks, recommended, ways_of

MOST_RANKS = 1024
MOST_TOKENS = 2**26
MOST_WINDOW = 2**31 - 1
MOST_ITEMS = 2**50  # queries have: strides and bytes of all ranks are 64-bit ints
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DEFAULTS = {"heads": 32, "width": 128, "layers": 1}
OF_MODEL = ("heads", "key_heads", "width", "layers", "hidden")

SUMMARY = "show what each method and layout costs for a model's attention, before anything runs"
DESCRIPTION = """\
Show what the ways to share a sequence cost: for each method of spar.attention and each layout the bytes that
a rank sends, what it holds, and how evenly the work lies. It needs no process group and no GPU: the exchanges
of spar.attention are planned as in training, but for no data. With --model it adds the memory of a rank.

  python -m spar plan --ranks 8 --tokens 131072 --heads 32 --key-heads 8 --width 128 --layers 32
  python -m spar plan --ranks 8 --tokens 131072 --documents mean=2000
  python -m spar plan --ranks 8 --tokens 262144 --model config.json

- rank: the one that sends the most in a step. forward, backward: bytes that it sends to others in one layer;
  step: in both, in all layers.
- held: K and V that exchanges brought, at once in forward. All but the ring keep theirs until backward.
- activations: the hidden states of a rank's tokens between all layers, as checkpoints of layers keep them.
- work: pairs of a query and a key that it attends to, on the busiest rank, as a multiple of the mean.
- time: of attention in a step of all layers, if speeds were measured:

  torchrun --standalone --nproc-per-node 8 -m spar plan --measure

held, activations and work are each of the rank with the most; --json names it."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="that share the sequence")
    parser.add_argument("--tokens", type=int, help="of the whole sequence; by default those of --documents")
    parser.add_argument(
        "--model",
        metavar="CONFIG",
        help="a config.json, a folder with one, or a name that transformers has on this machine: sizes and "
        "memory are those of this model",
    )
    parser.add_argument("--shards", type=int, help="ranks over which FSDP2 shards --model (default: --ranks)")
    parser.add_argument("--device-memory", type=float, metavar="GB", help="of --model (default: 80)")
    parser.add_argument("--heads", type=int, help="(default: 32)")
    parser.add_argument("--key-heads", type=int, help="of K and V (default: --heads)")
    parser.add_argument("--width", type=int, help="of a head (default: 128)")
    parser.add_argument("--layers", type=int, help="(default: 1)")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="bfloat16", help="of activations (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step (default: %(default)s)")
    parser.add_argument("--hidden", type=int, help="width of the hidden states (default: heads x width)")
    parser.add_argument(
        "--ring", type=int, help="ring ranks of the hybrid layout (default: as square as --ranks allows)"
    )
    parser.add_argument("--ulysses", type=int, help="its ulysses ranks (default: the rest)")
    parser.add_argument("--window", type=int, metavar="N", help="attend to the newest N keys alone")
    parser.add_argument(
        "--documents",
        metavar="LENGTHS",
        help="lengths of packed documents, such as 512,2048,1536; or mean=N: drawn with this mean length "
        "until they fill --tokens, the same each time",
    )
    parser.add_argument("--causal", action=BooleanOptionalAction, default=True, help="(default: --causal)")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time attention and exchanges on the ranks that torchrun started, and keep the speeds",
    )
    add_device_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, with bytes as numbers")


def run(args: Namespace) -> int:
    if args.measure:
        return measure.run(args.device, args.backend)
    model = _model_of(args)
    layer, found = layer_of(args), read(args.device)
    ways = plan(layer, found.far or found.near)
    best, why = recommended(ways)
    used = [] if model is None else uses(model, layer, best, args.shards)
    if args.json:
        facts = {**asdict(layer), "dtype": args.dtype, "documents": list(layer.documents)}
        text = call_of(best, layer, model is not None)
        call = {"method": best.method, "layout": best.layout, "call": text, "reason": why}
        whole = {
            "layer": facts,
            "planned_ranks": planned_ranks(layer.ranks),
            "ways": [asdict(way) for way in ways],
            "recommended": call,
            "memory": [{**asdict(use), "peak": use.peak} for use in used],
        }
        print(json.dumps(whole, indent=1))
    else:
        print(text_of(layer, ways, model is not None))
        if model is not None:
            print(f"\n{memory_text(model, layer, best, used, args.shards, args.device_memory * GIB)}")
    return 0


def _model_of(args: Namespace) -> Model | None:
    """Return the model of --model, and set its sizes in the arguments; without one set the defaults."""
    passed = [name for name in OF_MODEL if getattr(args, name) is not None]
    if args.model is None:
        for name in ("shards", "device_memory"):
            if getattr(args, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is passed without --model; expected both")
        for name, size in DEFAULTS.items():
            setattr(args, name, size if getattr(args, name) is None else getattr(args, name))
        args.value_width = args.width
        return None
    args.shards = args.ranks if args.shards is None else args.shards
    if args.shards is not None:  # without --ranks, which is reported later
        _check("shards", args.shards)
    args.device_memory = 80.0 if args.device_memory is None else args.device_memory
    if not args.device_memory > 0:
        raise UsageError(f"--device-memory is {args.device_memory:g}; expected GB, more than 0")
    if passed:
        name = passed[0].replace("_", "-")
        raise UsageError(f"--{name} is passed with --model, which has it; expected one of them")
    model = read_model(args.model)
    for name in (*OF_MODEL, "value_width"):
        setattr(args, name, getattr(model, name))
    return model


def plan(layer: Layer, speeds: Speeds | None = None) -> list[Way]:
    """Return the cost of each way, its time by speeds that were measured.

    Raises:
        UsageError: `spar.attention` refuses all of them.
    """
    pairs = ways_of(layer)
    shown = progress(pairs, len(pairs), " over ".join, sys.stderr.isatty())
    ways = [evaluate(layer, method, kind, speeds) for method, kind in shown]
    if all(way.refused for way in ways):
        raise UsageError(f"spar.attention cannot compute it: {ways[0].refused}")
    return ways


def layer_of(args: Namespace) -> Layer:
    """Check the arguments."""
    if args.ranks is None:
        raise UsageError("--ranks is not passed; expected how many ranks share the sequence")
    documents = _documents(args)
    if args.tokens is None and not documents:
        raise UsageError("neither --tokens nor the lengths of --documents are passed; expected one of them")
    tokens = args.tokens if args.tokens is not None else sum(documents)
    if documents and tokens != sum(documents):
        raise UsageError(f"--tokens is {tokens}; expected {sum(documents)}, the sum of --documents, or none")
    key_heads = args.heads if args.key_heads is None else args.key_heads
    hidden = args.heads * args.width if args.hidden is None else args.hidden
    most = {"ranks": MOST_RANKS, "tokens": MOST_TOKENS, "window": MOST_WINDOW}
    given = {name: getattr(args, name) for name in ("ranks", "heads", "width", "layers", "batch")}
    given |= {"tokens": tokens, "key_heads": key_heads, "hidden": hidden}
    given |= {} if args.window is None else {"window": args.window}
    for name, value in given.items():
        _check(name, value, most.get(name))
    items = args.batch * tokens * args.heads * args.width
    if items > MOST_ITEMS:
        raise UsageError(f"--batch x --tokens x --heads x --width is {items}; expected at most {MOST_ITEMS}")
    ring, ulysses = _ring_and_ulysses(args)
    return Layer(
        heads=args.heads,
        key_heads=key_heads,
        width=args.width,
        value_width=args.value_width,
        tokens=tokens,
        ranks=args.ranks,
        layers=args.layers,
        dtype=DTYPES[args.dtype],
        batch=args.batch,
        hidden=hidden,
        ring=ring,
        ulysses=ulysses,
        window=args.window,
        documents=documents,
        causal=args.causal,
    )


def _check(name: str, value: int, most: int | None = None) -> None:
    if value < 1 or (most is not None and value > most):
        limit = "at least 1" if most is None else f"1 to {most}"
        raise UsageError(f"--{name.replace('_', '-')} is {value}; expected {limit}")


def _ring_and_ulysses(args: Namespace) -> tuple[int, int]:
    ranks, ring, ulysses = args.ranks, args.ring, args.ulysses
    for name, value in (("ring", ring), ("ulysses", ulysses)):
        if value is not None and (value < 1 or ranks % value):
            raise UsageError(f"--{name} is {value}; expected a number that divides the {ranks} ranks")
    if ring is None and ulysses is None:
        ulysses = squarest(ranks)
    ring = ranks // ulysses if ring is None else ring
    ulysses = ranks // ring if ulysses is None else ulysses
    if ring * ulysses != ranks:
        raise UsageError(f"--ring x --ulysses is {ring} x {ulysses}; expected a product of {ranks}, --ranks")
    return ring, ulysses


def _documents(args: Namespace) -> tuple[int, ...]:
    text = args.documents
    if text is None:
        return ()
    expected = "lengths from 1 on, such as 512,2048, or mean=N with N from 1 on"
    is_mean = text.startswith("mean=")
    try:
        numbers = tuple([int(part) for part in text.removeprefix("mean=").split(",")])
    except ValueError:
        raise UsageError(f"--documents is {text!r:.200}; expected {expected}") from None
    if min(numbers) < 1 or (is_mean and len(numbers) != 1):
        raise UsageError(f"--documents is {text!r:.200}; expected {expected}")
    if not is_mean:
        return numbers
    if args.tokens is None:
        raise UsageError(f"--documents is {text} and --tokens is not passed; expected how many to fill")
    _check("tokens", args.tokens, MOST_TOKENS)
    return drawn_documents(args.tokens, numbers[0])
