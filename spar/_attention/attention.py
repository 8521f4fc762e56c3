"""spar.attention: check the arguments, and choose how the ranks share the work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, cast

import torch

from .. import _C
from .._checks import digest
from .._exchange.arguments import Arguments, ranks_of
from .._exchange.layouts import extent, total_of
from .._group.group import Call, Group, place_of
from ..sequence_layout import SequenceLayout, numbers_of
from ..topology.topology import current
from .kernels import NAMES, reason_against
from .masks import checked_mask
from .methods import Attend, Problem, gathered, hybrid, round_the_ring, ulysses
from .ring import exchanges_of

Layouts = SequenceLayout | tuple[SequenceLayout, SequenceLayout | None]


class _Method(NamedTuple):
    run: Callable[[Problem], torch.Tensor]
    exchanges: Callable[[int], int]  # of the forward, for a number of ranks


_METHODS = {
    "ulysses": _Method(ulysses, lambda world: 2),
    "gather": _Method(gathered, lambda world: 1),
    "ring": _Method(round_the_ring, lambda world: exchanges_of(world)[0]),
}


_TORCH = {  # arguments of scaled_dot_product_attention and of exchanges, and what replaces them
    "query": "q",
    "key": "k",
    "value": "v",
    "attn_mask": "mask",
    "is_causal": "causal",
    "enable_gqa": "nothing, as k and v may have fewer heads than q",
    "group": "layout, which has the group",
}
P = ParamSpec("P")


def _name_replacements(function: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """Raise a TypeError for a keyword of torch that names spar's; Python's names only what was passed."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        for name in kwargs:
            if name in _TORCH:
                raise TypeError(f"attention: {name} is not an argument; pass {_TORCH[name]}")
        return function(*args, **kwargs)

    return checked


@_name_replacements
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layouts,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    method: str | None = None,
    attend: Attend | str | None = None,
    seq_dim: int = 1,
    head_dim: int = 2,
) -> torch.Tensor:
    """Compute scaled dot product attention over a sequence that is sharded by a layout.

    Each rank passes its tokens and receives the attention of its queries to the keys of all ranks, as
    torch.nn.functional.scaled_dot_product_attention computes it from the whole sequence in natural order. In
    a packed layout a token attends to its own document. Gradients are exact: those of parameters are to be
    summed over the ranks.

    Methods:

    - "ulysses": two exchanges; a rank has some heads of the whole sequence between them, of K and V those
      that its query heads need. Ranks beyond the number of heads have none.
    - "gather": one exchange; a rank gathers all of K and V. Blocks that `causal` empties are skipped, so that
      a zigzag layout balances the work.
    - "ring": K and V go round the ranks, which hold at most two shards of them at a time.
    - None: for a hybrid layout, ulysses inside the ulysses groups and ring across them; else ulysses if there
      are at least as many heads as ranks; else gather.

    Args:
        q: this rank's queries `[B, S_local, H, D]`.
        k: keys `[B, S_local, K, D]`, for K heads that divide H.
        v: values `[B, S_local, K, E]`.
        layout: how the sequence lies on the ranks; or (layout of q, layout of k and v) for cross attention,
            where None is for k and v of which every rank holds the whole.
        causal: whether a query attends to no key behind its own place in the sequence or document.
        mask: as torch's attn_mask, bool or added to the scores, over the whole sequence: `[.., S, S]` that
            broadcasts to `[B, H, S, S]`; or a key mask `[B, S]`. The same on all ranks.
        scale: of the scores; 1 / sqrt(D) by default.
        dropout_p: the probability that a weight is dropped; not by the ring. Seed the ranks differently, as
            `spar.rank_seed` does.
        method: "ulysses", "gather" or "ring"; None chooses.
        attend: the caller's kernel, for ulysses and gather: a function of q, k and v, `[B, S, H, D]` with
            equal heads. It applies causality, scale and dropout itself. With gather it is called for each run
            of queries with the keys that the run may attend to; with `causal` those up to the run's last
            query, as flash_attn aligns them. Or the name of a kernel that returns a log-sum-exp, which each
            method can use: docs/attention.md lists them. None: torch's for ulysses, else the first that can.
        seq_dim: where S is, among the first three dims of q, k, v and the output.
        head_dim: where H is, likewise.

    Returns:
        A contiguous tensor `[B, S_local, H, E]`.

    Raises:
        ValueError: shapes, layout and mask do not match, or the method cannot compute this.
        TypeError: an argument is of another type. If it is the layout, on one rank alone, the peers wait for
            this rank until SPAR_TIMEOUT: nothing names their group.
        MismatchError: calls differ between ranks. Every rank raises.
    """
    queries, keys = layout if isinstance(layout, tuple) and len(layout) == 2 else (layout, layout)
    if not isinstance(queries, SequenceLayout) or not isinstance(keys, (SequenceLayout, type(None))):
        raise _layout_error(layout, q)
    two_levels = method is None and queries.kind == "hybrid" and keys == queries
    group = ranks_of(_ulysses_group(queries) if two_levels else queries.group, "attention")
    outer = ranks_of(_ring_group(queries), "attention") if two_levels else group
    device = _device_of(q)
    # After the last exchange the peers wait for this rank in their next call, of backward or the next layer.
    # A failure counts as this rank's next call, so that theirs fails at once. A caller that catches it and
    # goes on makes the call after that, as the peers do once they have raised.
    exchanges = exchanges_of(outer.world)[0] if two_levels else int(keys is not None)
    with (
        Call(outer, "attention", exchanges and exchanges + 1, device) as around,
        Call(group, "attention", 3 if two_levels else exchanges and exchanges + 1, device),
        Arguments("attention", q, group, "q", exchanges=0) as call,
    ):
        problem = _checked(
            call, k, v, queries, keys, causal, mask, scale, dropout_p, attend, seq_dim, head_dim
        )
        if method is None and not two_levels:
            method = "ulysses" if problem.heads >= call.world and keys is not None else "gather"
        if method not in _METHODS and not two_levels:
            raise call.error("method", repr(method), '"ulysses", "gather", "ring" or None')
        learns = problem.mask is not None and problem.mask.requires_grad and torch.is_grad_enabled()
        if learns and (method != "ulysses" or problem.kernel is not None):
            expected = 'one that does not, or method="ulysses" without a named kernel'
            raise call.error("mask", "a tensor that requires a gradient", expected)
        if two_levels:
            return hybrid(problem, _ulysses_group(queries), _ring_group(queries)).contiguous()
        run, count = _METHODS[cast(str, method)]
        around.exchanges = count(call.world) + 1 if keys is not None and count(call.world) else 0
        return run(problem).contiguous()


def _layout_error(layout: object, q: object) -> TypeError:
    """Return the error, and report it to the group of a layout in a wrong tuple; no other value names one."""
    error = TypeError(
        f"attention: layout is {layout!r:.200}; expected a SequenceLayout, or those of q and of k and v"
    )
    known = [each for each in layout if isinstance(each, SequenceLayout)] if isinstance(layout, tuple) else []
    if known:
        group = ranks_of(known[0].group, "attention")
        if isinstance(group, Group):
            group.report("attention", _device_of(q), error, group.count() + 1)
    return error


def _device_of(q: object) -> str | None:
    return q.device.type if isinstance(q, torch.Tensor) else None


def _checked(
    call: Arguments,
    k: Any,
    v: Any,
    queries: SequenceLayout,
    keys: SequenceLayout | None,
    causal: bool,
    mask: Any,
    scale: float | None,
    dropout_p: float,
    attend: Any,
    seq_dim: int,
    head_dim: int,
) -> Problem:
    q, k, v, mask = (_autocast(x, call.input.device.type) for x in (call.input, k, v, mask))
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise call.type_error(name, f"a {type(x).__name__}", "a tensor")
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise call.type_error(name, f"of {x.dtype} on {x.device}", f"{q.dtype} on {q.device}, as q")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise call.error(name, f"of shape {list(x.shape)}", "four dims, [B, S, H, D] by default")
    if not q.dtype.is_floating_point:
        raise call.type_error("q", f"a tensor of {q.dtype}", "a floating dtype")
    seq, head = call.dim("seq_dim", seq_dim), call.dim("head_dim", head_dim)
    if seq == head or 3 in (seq, head):
        raise call.error(
            "seq_dim", f"{seq_dim} and head_dim is {head_dim}", "two different dims before the last"
        )
    batch = 3 - seq - head
    _check_held(call, "q", q, queries, seq, head)
    shape, heads, key_heads = list(k.shape), q.size(head), k.size(head)
    if list(v.shape[:3]) != shape[:3]:
        raise call.error("v", f"of shape {list(v.shape)}", f"{shape[:3]} and a width, as k of shape {shape}")
    if (k.size(batch), k.size(3)) != (q.size(batch), q.size(3)):
        raise call.error("k", f"of shape {shape}", f"the batch and width of q, of shape {list(q.shape)}")
    if key_heads == 0 or heads % key_heads:
        raise call.error("k", f"of {key_heads} heads", f"a number that divides the {heads} heads of q")
    if keys is not None and keys.group is not queries.group:
        raise call.error("layout", f"{(queries, keys)}, of two groups", "layouts of one group")
    total = k.size(seq) if keys is None else keys.total
    if keys is not None:
        _check_held(call, "k", k, keys, seq, head)
    if keys != queries and "packed" in (queries.kind, keys.kind if keys is not None else ""):
        raise call.error("layout", f"{(queries, keys)}", "one packed layout for q, k and v")
    named = isinstance(attend, str)
    if not named and attend is not None and not callable(attend):
        raise call.type_error("attend", f"{attend!r:.200}", "a function, a kernel's name or None")
    if causal and attend is not None and not named and total != queries.total:
        expected = f"{queries.total} for attend with causal=True"
        raise call.error("the number of keys", total, expected)
    if mask is not None:
        mask = checked_mask(call, mask, q.size(batch), heads, queries.total, total)
    if not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise call.error("dropout_p", f"{dropout_p!r:.200}", "at least 0 and below 1")
    if attend is not None and not named:
        own = {"mask": mask, "scale": scale, "dropout_p": dropout_p or None}
        for name, value in own.items():
            if value is not None:
                raise call.error(name, "passed, and attend too", "attend to apply it itself")
    if named:
        _check_kernel(call, attend, q, v, mask, dropout_p)
    return Problem(
        call,
        q,
        k,
        v,
        queries,
        keys,
        bool(causal),
        mask,
        max(q.size(3), 1) ** -0.5 if scale is None else float(scale),  # scores of no width are 0
        float(dropout_p),
        None if named else attend,
        attend if named else None,
        (batch, head, seq),
        _note(causal, mask, scale, dropout_p),
    )


def _note(causal: bool, mask: torch.Tensor | None, scale: float | None, dropout_p: float) -> str:
    """Return what ranks compare besides shapes and layouts, which are the same in compiled code."""
    parts = ["causal True"] if causal else []
    if mask is not None:
        parts.append(f"mask of {mask.dtype}")
        if not torch.compiler.is_compiling() and _C.env("check") == "1":
            parts.append(f"hash of the mask {digest(mask):x}")
    if scale is not None:
        parts.append(f"scale {float(scale)}")
    if dropout_p:
        parts.append(f"dropout_p {float(dropout_p)}")
    return ", ".join(parts)


def _autocast(x: Any, device: str) -> Any:
    """Cast what torch's autocast casts of the arguments of scaled_dot_product_attention."""
    if not torch.is_autocast_enabled(device) or not isinstance(x, torch.Tensor) or x.device.type != device:
        return x
    casts = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if casts else x


def _check_kernel(
    call: Arguments, name: str, q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout_p: float
) -> None:
    if name not in NAMES:
        raise call.error(
            "attend", repr(name), f"a function, None or the name of a kernel: {', '.join(NAMES)}"
        )
    if why := reason_against(name, q, v, mask):
        raise call.error("attend", repr(name), f"a kernel that can compute this; {name} cannot, as {why}")
    if dropout_p:
        raise call.error("dropout_p", f"{dropout_p}", f"0 with the kernel {name}")


def _check_held(
    call: Arguments, name: str, x: torch.Tensor, layout: SequenceLayout, seq: int, head: int
) -> None:
    place = place_of(layout.group)
    numbers = numbers_of(layout, 0)
    expected, held = extent(numbers, place.world, place.rank), x.size(seq)
    if held != expected:
        hint = ". Is it the whole sequence?" if held == total_of(numbers) else ""
        if x.size(head) == expected:
            hint = f". Are the tokens in dim {head}, as in [B, H, S, D]? Pass seq_dim={head}, head_dim={seq}"
        raise call.error(
            name, f"of {held} tokens", f"{expected}, rank {place.rank}'s shard in {layout}{hint}"
        )


def _group_of_state(layout: SequenceLayout, name: str) -> Any:
    """Return a group of the current parallel state, whose cp group is the layout's."""
    state = current().state
    group = None if state is None or state.get_group("cp") is not layout.group else state.get_group(name)
    if group is None:
        raise ValueError(
            f"attention: {layout} is not of the current parallel state; make that current "
            "(spar.topology.bind), or pass a method"
        )
    return group


def _ulysses_group(layout: SequenceLayout) -> Any:
    return _group_of_state(layout, "ulysses")


def _ring_group(layout: SequenceLayout) -> Any:
    return _group_of_state(layout, "ring")
