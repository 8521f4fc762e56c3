# SPDX-License-Identifier: Apache-2.0
"""spar.attention: find how the ranks share the work, which a group remembers, or check and decide it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch.compiler import is_dynamo_compiling

from .._deprecated import outside_level, warn_deprecated
from .._exchange.arguments import Arguments, ranks_of
from .._group.group import Call, Group
from .._group.registry import by_process_group
from .._transports.dtypes import PLAIN_TYPES
from ..sequence_layout import SequenceLayout
from ..topology.topology import current
from .choice import PASSED, Choice, choose, noted
from .key import key_of
from .methods import Run, gather, hybrid, ring, ulysses
from .pairs import Function
from .problem import Problem, checked
from .request import Attend, Request, hashes_of
from .ring import forward_exchanges
from .slices import in_slices, slices_of
from .spans import Spans

Layouts = SequenceLayout | tuple[SequenceLayout, SequenceLayout | None]


class _Method(NamedTuple):
    """A way to share an attention, and its number of exchanges in forward for a number of ranks."""

    decide: Callable[[Problem], Run]
    exchanges: Callable[[int], int]


def _grid_methods() -> Any:
    """Import what rows and columns of ranks need where they are used: few programs do."""
    from . import grid_methods

    return grid_methods


_METHODS = {
    "ulysses": _Method(ulysses, lambda world: 2),
    "gather": _Method(gather, lambda world: 1),
    "ring": _Method(ring, forward_exchanges),
    "2d": _Method(lambda problem: _grid_methods().by_rows_and_columns(problem), lambda world: 2),
    "ulysses_gather": _Method(lambda problem: _grid_methods().ulysses_gather(problem), lambda world: 2),
}
METHODS = tuple(_METHODS)


class Attention(NamedTuple):
    """What was decided of an attention from shapes, layouts and options; a group remembers it by these.

    Attributes:
        run: attends.
        mask: the shape of the mask with four dims; None: there is none.
        exchanges: as of Call, how many of this rank its peers wait for if it fails.
        choice: the method, and why.
    """

    run: Run
    mask: tuple[int, ...] | None
    exchanges: int
    choice: Choice


# Arguments of scaled_dot_product_attention and of exchanges, and what replaces them.
_REPLACEMENTS = {
    "query": "q",
    "key": "k",
    "value": "v",
    "attn_mask": "mask",
    "is_causal": "causal",
    "enable_gqa": "nothing, as k and v may have fewer heads than q",
    "group": "layout, which has the group",
}
_warned = False  # of dims that no shape tells apart
P = ParamSpec("P")
Result = TypeVar("Result")


def _name_replacements(function: Callable[P, Result]) -> Callable[P, Result]:
    """Raise a TypeError that says what to pass for a keyword of torch, or for a layout that is missing.

    `attend` is the name that `kernel` had.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Result:
        for name in kwargs:
            if name in _REPLACEMENTS:
                raise TypeError(f"attention: {name} is not an argument; pass {_REPLACEMENTS[name]}")
        if len(args) < 4 and "layout" not in kwargs:
            raise TypeError(
                "attention: layout is missing; expected the SequenceLayout by which q, k and v were sharded: "
                "layout = spar.SequenceLayout.even(total, group), and layout.shard(x, 1) of the whole input"
            )
        if "attend" in kwargs:
            if "kernel" in kwargs:
                raise TypeError(
                    "attention: kernel and attend are passed; pass kernel alone, whose former name is attend"
                )
            warn_deprecated("attention(attend=)", "kernel=", "0.4.0")
            kwargs["kernel"] = kwargs.pop("attend")
        return function(*args, **kwargs)

    return wrapper


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layouts,
    *,
    causal: bool = False,
    mask: torch.Tensor | Spans | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    bias: Function | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    method: str | None = None,
    grid: tuple[int, int] | None = None,
    float8: str | None = None,
    kernel: Attend | str | None = None,
    seq_dim: int | None = None,
    head_dim: int | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layouts,
    *,
    causal: bool = False,
    mask: torch.Tensor | Spans | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    bias: Function | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    method: str | None = None,
    grid: tuple[int, int] | None = None,
    float8: str | None = None,
    kernel: Attend | str | None = None,
    seq_dim: int | None = None,
    head_dim: int | None = None,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@_name_replacements
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layouts,
    *,
    causal: bool = False,
    mask: torch.Tensor | Spans | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    bias: Function | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    method: str | None = None,
    grid: tuple[int, int] | None = None,
    float8: str | None = None,
    kernel: Attend | str | None = None,
    seq_dim: int | None = None,
    head_dim: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute scaled dot product attention over a sequence that is sharded by a layout.

    Each rank passes its tokens and receives the attention of its queries to the keys of all ranks, as
    torch.nn.functional.scaled_dot_product_attention computes it from the whole sequence in natural order. In
    a packed layout a token attends to its own document. Gradients are exact: those of parameters are to be
    summed over the ranks.

    Methods:

    - "ulysses": two exchanges; a rank has some heads of the whole sequence between them, of K and V those
      that its query heads need. Ranks beyond the number of heads have none.
    - "gather": one exchange; a rank gathers all of K and V, in a balanced layout those of its documents.
      Blocks that `causal` empties are skipped, so that a zigzag layout balances the work.
    - "ring": K and V go round the ranks, which hold at most two shards of them at a time.
    - "2d": two exchanges; ranks form a grid. A rank attends with the queries of its row to the keys of its
      column, and results of a row are merged by their log-sum-exp. Not limited by the number of heads.
    - "ulysses_gather": two exchanges; the ranks of a row share the heads of the row's queries, and gather
      their keys from all ranks. For numbers of ranks that do not divide the heads.
    - None: for a hybrid layout, ulysses inside the ulysses groups and ring across them; gather for a balanced
      one; else by the speeds that `spar plan --measure` found; else ulysses if there are at least as many
      heads as ranks; else gather.

    Args:
        q: this rank's queries `[B, S_local, H, D]`.
        k: keys `[B, S_local, K, D]`, for K heads that divide H.
        v: values `[B, S_local, K, E]`.
        layout: how the sequence lies on the ranks; or (layout of q, layout of k and v) for cross attention,
            where None is for k and v of which every rank holds the whole.
        causal: whether a query attends to no key behind its own place in the sequence or document.
        mask: which keys a query attends to, over the whole sequence, the same on all ranks. `spar.Spans`, of
            which there are some bytes for each query; or as torch's attn_mask, bool or added to the scores,
            `[.., S, S]` that broadcasts to `[B, H, S, S]`; or a key mask `[B, S]`. A key must be left by the
            mask, by `causal`, by the window and by a packed layout.
        window: (left, right), how many keys before and behind its place a query attends to besides the one
            there; None on a side: all. As flash_attn's window_size, which has -1 for None. All methods but
            ulysses then exchange only the keys that a rank's queries attend to.
        sinks: floating `[H]`, for each head the score of one more key, whose value is 0 (gpt-oss). It may
            require a gradient, which is to be summed over the ranks.
        softcap: c, if scores x are to be c tanh(x / c), as in Gemma 2.
        bias: a function of one (batch, head, query, key), places in the whole sequence, int64 tensors
            without dims; it returns what is added to the score there, as ALiBi. torch.vmap calls it for the
            pairs of each block, in backward again. Its result must not require a gradient.
        scale: of the scores; 1 / sqrt(D) by default.
        dropout_p: the probability that a weight is dropped; by ulysses and gather alone, and not with sinks,
            softcap or a bias. Seed the ranks differently, as `spar.rank_seed` does.
        method: "ulysses", "gather", "ring", "2d" or "ulysses_gather"; None chooses one of the first three.
        grid: (rows, columns) of ranks for "2d" and "ulysses_gather", whose product is their number. None: by
            "2d" the grid that sends the fewest bytes; by "ulysses_gather" likewise, of those whose ranks have
            equally many heads.
        float8: "forward", "backward" or "both": exchanges of q, k, v and the output, or of their gradients,
            move float8 with a scale for each head of each token: about half of the bytes of 16 bits. Not by
            the ring, and not for float64. Results are then not exact: docs/attention.md has the bounds.
        kernel: the caller's own, for ulysses and gather: a function of q, k and v, `[B, S, H, D]` with
            equal heads. It applies causality, scale and dropout itself. With gather it is called for each run
            of queries with the keys that the run may attend to; with `causal` those up to the run's last
            query, as flash_attn aligns them. Or the name of a kernel that returns a log-sum-exp, which each
            method can use: docs/attention.md lists them. None: torch's for ulysses, else the first that can.
        seq_dim: where S is, among the first three dims of q, k, v and the output; 1 by default.
        head_dim: where H is, likewise; 2 by default. Where this rank has as many tokens as heads, pass both:
            no shape tells `[B, S, H, D]` from torch's `[B, H, S, D]` then, and a warning says so.
        return_lse: whether to return the log-sum-exp of the scores of each query and head, too, that of a
            sink among them: by it outputs over other keys are merged. Not with dropout_p or a function.

    Returns:
        A contiguous tensor `[B, S_local, H, E]`. With return_lse a tuple of it and of the log-sum-exp
        `[B, S_local, H]`, float32, or float64 as the inputs are; -inf for a query without keys. Its gradients
        are exact, too.

    Raises:
        ValueError: shapes, layout and mask do not match, or the method cannot compute this.
        TypeError: an argument is of another type. If it is the layout, on one rank alone, the peers wait for
            this rank until SPAR_TIMEOUT: nothing names their group.
        MismatchError: calls differ between ranks. Every rank raises.
    """
    queries, keys = layout if isinstance(layout, tuple) and len(layout) == 2 else (layout, layout)
    if not isinstance(queries, SequenceLayout) or not isinstance(keys, (SequenceLayout, type(None))):
        raise _layout_error(layout, q)
    function, name = (None, kernel) if isinstance(kernel, str) else (kernel, None)
    spans, dense = (mask, None) if isinstance(mask, Spans) else (None, mask)
    options = causal, window, grid, float8, softcap, scale, dropout_p, method, name, seq_dim, head_dim
    tensors = q, k, v, queries, keys, dense, spans, sinks, bias, function
    passed: tuple[Any, ...] = *tensors, *options, bool(return_lse)
    request = Request(*passed)
    if method is not None or queries.kind != "hybrid" or keys != queries:
        return _attend(request)
    groups = _group_of_state(queries, "ulysses"), _group_of_state(queries, "ring")
    across = ranks_of(groups[1], "attention")
    with Call(across, "attention", _until_next(forward_exchanges(across.world)), _device_of(q)):
        return _attend(request, groups)


def exchanges_only(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: SequenceLayout,
    *,
    causal: bool,
    mask: Spans | None,
    window: tuple[int | None, int | None] | None,
    method: str | None,
    groups: tuple[Any, Any] | None = None,
) -> torch.Tensor:
    """Check and exchange as `attention` does, and return zeros: nothing is computed.

    groups: of ulysses, and of the ring around it, for a hybrid layout and method None.
    """
    options = causal, window, None, None, None, None, 0.0, method, None, 1, 2, False, False
    passed: tuple[Any, ...] = q, k, v, layout, layout, None, mask, None, None, None, *options
    zeros: torch.Tensor = _attend(Request(*passed), groups)
    return zeros


def _until_next(exchanges: int) -> int:
    """Return how many exchanges of this rank its peers wait for, if it fails in a forward of so many.

    After the last one they wait for it in their next call, of backward or the next layer. A failure counts as
    this rank's next call, so that theirs fails at once. A caller that catches it and goes on makes the call
    after that, as the peers do once they have raised.
    """
    return exchanges and exchanges + 1


def _attend(request: Request, groups: tuple[Any, Any] | None = None) -> Any:
    """Find the attention of a request of which the layouts are checked, or check and decide it; and attend.

    groups: of ulysses, and of the ring around it.
    """
    among = groups[0] if groups else request.queries.group
    known = None if is_dynamo_compiling() else by_process_group.get(id(among))
    group = ranks_of(among, "attention") if known is None else known
    # As `_until_next` says, until it is known which method it is.
    waited = 3 if groups else 2 * int(request.keys is not None)
    q, dtype = request.q, None
    with Call(group, "attention", waited, _device_of(q)) as call:
        if isinstance(q, torch.Tensor) and not q.is_meta:  # meta tensors have no autocast
            device = "cpu" if q.is_cpu else q.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = found = None
        if isinstance(group, Group) and not torch.compiler.is_compiling():
            key = key_of(request, dtype, groups)
            found = None if key is None else group.exchanges.get(key)
        if found is None:
            with Arguments("attention", q, group, "q", 0) as checks:
                found = _decided(checks, request, dtype, groups)
            if isinstance(group, Group) and key is not None:
                group.exchanges[key] = found
        call.exchanges = found.exchanges
        if not torch.compiler.is_compiling() and (note := noted.get()) is not None:
            note(found.choice)
        if dtype is not None:
            request = _cast(request, dtype)
        if found.mask is not None:
            request = request._replace(mask=request.mask.reshape(found.mask))
        out, *lse = found.run(request)
        return (out.contiguous(), lse[0].contiguous()) if lse else out.contiguous()


def _cast(request: Request, dtype: torch.dtype) -> Request:
    """Cast what torch's autocast casts of the arguments of scaled_dot_product_attention."""
    device, made = request.q.device.type, {}
    for name in ("q", "k", "v", "mask"):
        x = getattr(request, name)
        is_cast = isinstance(x, torch.Tensor) and x.device.type == device and x.is_floating_point()
        if is_cast and x.dtype != torch.float64:
            made[name] = x.to(dtype)
    return request._replace(**made)


def _decided(
    call: Arguments, request: Request, dtype: torch.dtype | None, groups: tuple[Any, Any] | None
) -> Attention:
    """Check a request but for the layouts, and decide how the ranks share it; dtype: as of `key_of`."""
    hashes, method, reason = hashes_of(request), request.method, PASSED
    if dtype is not None:
        request = _cast(request, dtype)
        call.input = request.q
    # Results of several ranks are merged by the log-sum-exp.
    is_merged = method == "2d" and request.attend is None and not request.dropout_p
    problem = checked(call, request._replace(returns_lse=True) if is_merged else request, hashes)
    if request.seq_dim is request.head_dim is None and not torch.compiler.is_compiling():
        sizes = problem.shapes.tokens, problem.shapes.heads, problem.shapes.key_heads
        if sizes[0] > 1 and len(set(sizes)) == 1:
            _warn_of_dims(request.q.shape)
    if method is None and groups is None:
        method, reason = choose(problem, request)
    if method not in _METHODS and groups is None:
        names = ", ".join([f'"{name}"' for name in METHODS])
        raise call.error("method", repr(method), f"{names} or None")
    shapes = problem.shapes
    if method in ("2d", "ulysses_gather") or request.grid is not None or request.float8 is not None:
        methods = _grid_methods()
        grid = methods.checked_grid(call, request.grid, method, shapes.heads, shapes.key_heads)
        float8 = methods.checked_float8(call, request.float8, method, shapes)
        if any(float8) and method in methods.GRIDS_LIKE:
            # Exchanges of a grid alone move rows.
            method, grid = "ulysses_gather", methods.GRIDS_LIKE[method](call.world)
        problem = replace(problem, grid=grid, float8=float8)
    learns = problem.mask is not None and request.mask.requires_grad and torch.is_grad_enabled()
    if learns and (method != "ulysses" or problem.by_blocks):
        expected = (
            'one that does not, or method="ulysses" without a named kernel, spans, window, sinks, '
            "softcap and bias"
        )
        raise call.error("mask", "a tensor that requires a gradient", expected)
    if groups is not None:
        choice = Choice("hybrid", 1, "the layout is hybrid")
        return Attention(hybrid(problem, *groups), problem.mask, _until_next(2), choice)
    decide, count = _METHODS[str(method)]
    slices = slices_of(str(method), problem, request)
    exchanges = 0 if problem.keys is None else _until_next(slices * count(call.world))
    run = decide(problem) if slices == 1 else in_slices(str(method), problem, slices)
    return Attention(run, problem.mask, exchanges, Choice(str(method), slices, reason))


def _warn_of_dims(shape: torch.Size) -> None:
    """Warn, once in a process, that q may be `[B, H, S, D]`: both dims have one size."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"attention: q is of shape {list(shape)} and read as [B, S, H, D]. This rank has as many "
            "tokens as heads, so it may also be [B, H, S, D]: pass seq_dim=2, head_dim=1 for that, "
            "else seq_dim=1, head_dim=2",
            stacklevel=outside_level(),
        )


def _layout_error(layout: object, q: object) -> TypeError:
    """Return the error, and report it to the group of a layout in a wrong tuple; no other value names one."""
    error = TypeError(
        f"attention: layout is {layout!r:.200}; expected a SequenceLayout, or those of q and of k and v"
    )
    parts = layout if isinstance(layout, tuple) else ()
    if layouts := [part for part in parts if isinstance(part, SequenceLayout)]:
        group = ranks_of(layouts[0].group, "attention")
        if isinstance(group, Group):
            group.report("attention", _device_of(q), error, group.count() + 1)
    return error


def _device_of(q: object) -> str | None:
    """Return the type of the device of a call's exchanges, as of Call."""
    if not isinstance(q, torch.Tensor):
        return None
    if type(q) not in PLAIN_TYPES and hasattr(q, "fake_mode"):
        return "meta"
    return "cpu" if q.is_cpu else q.device.type


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
