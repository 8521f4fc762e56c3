# SPDX-License-Identifier: Apache-2.0
"""One call of a module on tiles of its tokens: forward, and backward, which runs each tile again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from .aliases import Aliases
from .memory import memory_of, memory_order
from .nested import changed, tensors_in
from .part import Part, mark, part_of
from .patches import reentered
from .report import place_of_caller
from .tile_parts import NotByToken, TileParts
from .view import View, without_view

AGAIN = (
    "ran by tiles, whose gradients cannot be differentiated again (create_graph=True); for that parallelize "
    "the model without tile"
)
# Called with the results on a tile, its start and its size; returns results with their gradients.
OfTile = Callable[[list[Tensor], int, int], list[tuple[Tensor, Tensor]]]


class TiledCall:
    """A call on parts of one sequence, or of sequences that are joined alike.

    It refers to no tensor of its arguments: what backward needs is saved by autograd.

    run: called with tiles in the place of the tensors in args and kwargs.
    module: has the parameters and buffers that run reads.
    size: the tokens of a tile.
    """

    def __init__(
        self, view: View, run: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, size: int
    ) -> None:
        self.view, self.run, self.module, self.size = view, run, module, size
        self.base = view.parts
        inputs = inputs_of(args, kwargs)
        self.parts = [part_of(x) for x in inputs]
        first = next(part for part in self.parts if part is not None)
        self.lengths, self.held = first.lengths, first.held
        self.autocast = Autocast(inputs[0].device.type)
        empty = {id(x): torch.empty(0, device="meta") for x in inputs}
        self.places = {id(empty[id(x)]): place for place, x in enumerate(inputs)}
        self.arguments = changed(lambda x: empty[id(x)], (args, kwargs))
        self.modes = [inner.training for inner in module.modules()]
        self.results: Any = None  # without elements
        self.of_results: list[Part] = []

    def forward(self, inputs: list[Tensor]) -> Any:
        """Return what run returns, of all of this rank's tokens."""
        tensors = [*inputs, *named_parameters(self.module)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            found: Sequence[Tensor] = _ByTile.apply(self, *tensors)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                found = self.joined(inputs)
        each = iter([mark(x, part) for x, part in zip(found, self.of_results, strict=True)])
        return changed(lambda _: next(each), self.results)

    # ---- tiles ----

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Return where each tile begins, and its tokens; one without tokens where the rank has none."""
        for start in range(0, max(self.held, 1), self.size):
            yield start, min(self.size, self.held - start)

    def tile(self, inputs: Sequence[Tensor], start: int, size: int) -> list[Tensor]:
        return [
            x if part is None else _cut(x, part, start, size)
            for x, part in zip(inputs, self.parts, strict=True)
        ]

    def parts_of(self, size: int) -> TileParts:
        return TileParts.of(self.base, self.lengths, size)

    def with_inputs(self, tensors: Sequence[Tensor]) -> Any:
        """Return args and kwargs with tensors as their inputs."""
        return changed(lambda x: tensors[self.places[id(x)]], self.arguments)

    def with_weights(self, weights: list[Tensor]) -> AbstractContextManager[None]:
        """Let the module have others in the place of its parameters."""
        names = named_parameters(self.module).values()
        named = {name: x for each, x in zip(names, weights, strict=True) for name in each}
        found: AbstractContextManager[None] = _reparametrize_module(self.module, named)
        return found

    @contextmanager
    def as_in_forward(self, buffers: Sequence[Tensor]) -> Iterator[None]:
        """Let the module have the buffers of its forward, and the modes, as backward runs it again."""
        modules = [*self.module.modules()]
        before = [inner.training for inner in modules]
        try:
            for inner, mode in zip(modules, self.modes, strict=True):
                inner.training = mode
            with _reparametrize_module(
                self.module, dict(zip(_buffers_of(self.module), buffers, strict=True))
            ):
                yield
        finally:
            for inner, mode in zip(modules, before, strict=True):
                inner.training = mode

    def run_tile(self, tensors: list[Tensor], tile: TileParts, place: bytes | None) -> Any:
        """Run on what `tile` returned; call it outside of the view. place: as that of `View.on_tile`."""
        for x, part in zip(tensors, self.parts, strict=True):
            if part is not None:
                mark(x, tile.tile_of(part))
        args, kwargs = self.with_inputs(tensors)
        fixed = [*tensors, *self.module.parameters(), *self.module.buffers()]
        with self.view.on_tile(tile, _Unchanged(fixed), place), self.autocast:
            out = self.run(*args, **kwargs)
        return self.checked(out, tile, tensors)

    def checked(self, out: Any, tile: TileParts, given: Sequence[Tensor]) -> Any:
        """Return what a run returned, if it is of the tile's tokens, in memory of its own."""
        found = tensors_in(out)
        if not (is_plain(out) and found):
            raise NotByToken(f"returns a {type(out).__name__}")
        for x in found:
            if (part := part_of(x)) is None or part.parts is not tile:
                raise NotByToken("returns a tensor that is not one of its tokens")
        if len({memory_of(x) for x in (*given, *found)}) < len({*map(memory_of, given)}) + len(found):
            raise NotByToken("returns tensors that share memory with an argument or each other")
        return out

    def joined(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return the tensors that run returns, each of all tiles, and note what they are."""
        place: bytes | None = None
        found: list[Tensor] = []
        for start, size in self.ranges():
            out = self.run_tile(self.tile(inputs, start, size), self.parts_of(size), place)
            tensors = tensors_in(out)
            if place is None:
                self.results = changed(lambda _: torch.empty(0, device="meta"), out)
                self.of_results = [self._of_all(x) for x in tensors]
                found = [_room(x, part) for x, part in zip(tensors, self.of_results, strict=True)]
                place = self.view._place
            for whole, part, x in zip(found, self.of_results, tensors, strict=True):
                _put(x, whole, part, start, size)
            del out, tensors, x  # before the next tile's
        return found

    def _of_all(self, x: Tensor) -> Part:
        """Return the part of all of this rank's tokens of whose tokens a tile is."""
        tile = part_of(x)
        assert tile is not None
        return self.base.part(tile.dim, tile.lengths, tile.outer, tile.inner)

    def gradients(
        self, saved: Sequence[Tensor], needs: Sequence[bool], given: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients of inputs and parameters, by those of the results, in backward.

        saved: inputs, parameters and buffers.
        """
        tensors, buffers = saved[: len(needs)], saved[len(needs) :]

        def of_tile(results: list[Tensor], start: int, size: int) -> list[tuple[Tensor, Tensor]]:
            return [
                (x, _cut(gradient, part, start, size))
                for x, gradient, part in zip(results, given, self.of_results, strict=True)
                if gradient is not None and x.requires_grad
            ]

        with reentered(self.view, self.base), without_view(), self.as_in_forward(buffers):
            return self.differentiated(tensors, needs, self.view._place, of_tile).result()

    def differentiated(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], place: bytes | None, of_tile: OfTile
    ) -> Gradients:
        """Run each tile, and return the gradients of inputs and parameters."""
        count = len(self.parts)
        sums = Gradients(tensors, needs, self.parts)
        weights = [
            x.detach().requires_grad_(needed)
            for x, needed in zip(tensors[count:], needs[count:], strict=True)
        ]
        with self.with_weights(weights):
            for start, size in self.ranges():
                own = [
                    x.detach().requires_grad_(needed)
                    for x, needed in zip(self.tile(tensors[:count], start, size), needs, strict=False)
                ]
                with torch.enable_grad():
                    results = tensors_in(self.run_tile(own, self.parts_of(size), place))
                place = self.view._place if place is None else place
                pairs = of_tile(results, start, size)
                wanted = [x for x in (*own, *weights) if x.requires_grad]
                check_reads(results, wanted)
                if pairs:
                    outputs, of_outputs = zip(*pairs, strict=True)
                    found = torch.autograd.grad(outputs, wanted, of_outputs, allow_unused=True)
                    sums.add(found, start, size)
                del own, results, pairs
        return sums


class _ByTile(torch.autograd.Function):
    """A call on tiles; its gradient cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, call: TiledCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = call.joined(list(tensors[: len(call.parts)]))
        ctx.call = call
        ctx.save_for_backward(*tensors, *_buffers_of(call.module).values())
        ctx.mark_non_differentiable(*[x for x in found if not (x.is_floating_point() or x.is_complex())])
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{type(ctx.call.module).__name__} {AGAIN}")
        return None, *ctx.call.gradients(ctx.saved_tensors, ctx.needs_input_grad[1:], given)


class Gradients:
    """Gradients of a call: of parts each tile's beside the others, of other tensors their sum."""

    def __init__(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], parts: Sequence[Part | None]
    ) -> None:
        self.tensors, self.needs = tensors, needs
        self.parts = [*parts, *[None] * (len(tensors) - len(parts))]
        self.found: list[Tensor | None] = [None] * len(tensors)

    def add(self, gradients: Sequence[Tensor | None], start: int, size: int) -> None:
        """Add a tile's gradients of those tensors that need one."""
        places = [place for place, needed in enumerate(self.needs) if needed]
        for place, gradient in zip(places, gradients, strict=True):
            if gradient is None:
                continue
            x, part, total = self.tensors[place], self.parts[place], self.found[place]
            if total is None:
                is_wide = part is not None or x.dtype.itemsize > 2
                kind = x.dtype if is_wide else torch.float32
                total = self.found[place] = torch.zeros_like(x, dtype=kind)
            if part is None:
                total += gradient
            else:
                _put(gradient, total, part, start, size)

    def result(self) -> list[Tensor | None]:
        return in_dtypes(self.found, [x.dtype for x in self.tensors])


class _Unchanged(Aliases):
    """The aliases of code that may not change tensors: where it runs again it would read the change."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._fixed = {memory_of(x) for x in tensors if torch._C._has_storage(x)}

    def write(self, x: Tensor) -> bool:
        if torch._C._has_storage(x) and memory_of(x) in self._fixed:
            raise NotByToken(f"changes an argument, parameter or buffer in place at {place_of_caller()}")
        return super().write(x)


class Autocast:
    """Enters autocast as it is where this is made.

    Casts are not kept: those of a forward, without a graph, would be found by code that records one.
    """

    def __init__(self, device: str) -> None:
        self.device, self.is_enabled = device, False
        if torch.amp.is_autocast_available(device):
            self.is_enabled = torch.is_autocast_enabled(device)
            self.dtype = torch.get_autocast_dtype(device)

    def __enter__(self) -> None:
        self._entered = []
        if torch.amp.is_autocast_available(self.device):
            self._entered.append(torch.autocast(self.device, self.dtype, self.is_enabled, False))
            self._entered[0].__enter__()

    def __exit__(self, *error: Any) -> None:
        for entered in self._entered:
            entered.__exit__(*error)


def check_reads(results: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Raise if results depend on other tensors that receive gradients than those that are known."""
    ids, seen = set(map(id, known)), set()
    nodes: list[Any] = [x.grad_fn for x in results if x.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", known[0])) not in ids:
            raise NotByToken("reads a weight or an activation that is neither its own nor an argument")
        nodes += [before for before, _ in node.next_functions if before is not None]


def in_dtypes(gradients: Sequence[Tensor | None], kinds: Sequence[torch.dtype]) -> list[Tensor | None]:
    return [None if x is None else x.to(kind) for x, kind in zip(gradients, kinds, strict=True)]


def inputs_of(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among a call's arguments, each once."""
    return [*{id(x): x for x in tensors_in(args, kwargs)}.values()]


def is_plain(value: Any, may_change: bool = True) -> bool:
    """Whether a value has no objects but tensors, numbers, texts, dtypes and devices.

    may_change: whether it may be lists and dicts, which code that receives them can change.
    """
    if isinstance(value, dict):
        return may_change and all(map(is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        is_kept = may_change or isinstance(value, tuple)
        return is_kept and all(is_plain(entry, may_change) for entry in value)
    kinds = Tensor, int, float, str, torch.dtype, torch.device
    return value is None or isinstance(value, kinds)


def named_parameters(module: nn.Module) -> dict[Tensor, list[str]]:
    """Return the parameters of a module with their names, several of which may be one parameter's."""
    found: dict[Tensor, list[str]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        found.setdefault(weight, []).append(name)
    return found


def _buffers_of(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers(remove_duplicate=False))


def _cut(x: Tensor, part: Part, start: int, size: int) -> Tensor:
    """Return a tile of a part, without gaps in memory."""
    own = _place(x, part, start, size)
    own = own if part.outer == 1 else own.flatten(part.dim, part.dim + 2)
    return own if own.is_contiguous() else own.clone(memory_format=torch.preserve_format)


def _put(x: Tensor, whole: Tensor, part: Part, start: int, size: int) -> None:
    """Write a tile to its place in a part."""
    tile = x if part.outer == 1 else x.unflatten(part.dim, (part.outer, size, part.inner))
    _place(whole, part, start, size).copy_(tile)


def _place(x: Tensor, part: Part, start: int, size: int) -> Tensor:
    if part.outer == 1:
        return x.narrow(part.dim, start * part.inner, size * part.inner)
    shape = part.outer, part.held, part.inner
    rows: Tensor = x.unflatten(part.dim, shape)
    return rows.narrow(part.dim + 1, start, size)


def _room(x: Tensor, part: Part) -> Tensor:
    """Return an empty tensor for all tiles of which one is x."""
    shape = [*x.shape[: part.dim], part.local, *x.shape[part.dim + 1 :]]
    return torch.empty_permuted(shape, memory_order(x), dtype=x.dtype, device=x.device)
