# SPDX-License-Identifier: Apache-2.0
"""Shard stock transformers of diffusers over the sequence, and autoencoders over rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import torch

from .._control.agreement import is_reported
from .._exchange.arguments import ranks_of
from .._group.group import MOST_EXCHANGES, Call
from .._view.agreement import Agreement
from .._view.images import has_convolutions
from .._view.model import check_module, is_sharded, sharded, unsharded
from .._view.report import Report
from ..topology.resolve import Group, process_group
from ._diffusers.attention import JointProcessor, ShardedAttention, register_backend, unregister_backend
from ._diffusers.kernels import kernels_of_parts
from ._diffusers.names import BACKEND, Names, load
from ._diffusers.plan import Part, Rule, argument_names, default_plan, rules_of
from ._diffusers.sequences import TEXT, Sequences

__all__ = ["disable", "enable"]

_WHERE = "diffusers.enable"
_STATE = "_spar_sharded"  # the attribute of a model that is enabled
_PROCESSOR = "processor"  # the attribute of an attention module
_OF_PIPELINES = ("transformer", "transformer_2", "unet", "vae")  # the attributes of a pipeline to shard
_ABSENT = object()  # the value of an attribute that an object lacks


def enable(
    model: torch.nn.Module,
    group: Group = None,
    plan: Any = None,
    *,
    method: str | None = None,
    strict: bool = False,
) -> Report | None:
    """Shard the sequence of a transformer of diffusers, or an autoencoder's rows, over the ranks of a group.

    From then on, in each forward, `decode` and `encode`.

    Every rank calls the model with the same whole inputs and receives the whole output, of the type that the
    model returns. Inside, each rank has its part of the tokens, by `cal_split_sizes`; attention is exact. Of
    an autoencoder each rank has rows of the image in the decoder and in the encoder, with those of its
    neighbours around them where a convolution needs them: there are no seams.
    Compute the same loss on all ranks, and average the gradients of parameters over them, as DDP and FSDP2
    do: they are then those of one process. Does not communicate.

    Args:
        model: the transformer itself, `pipe.transformer`, or `pipe.vae`, not a wrapper. It is changed in
            place.
        group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current topology's
            sequence group (WORLD if there is none).
        plan: None for any class: `spar.shard_model` shards it. Models under torch.compile need a plan, of
            where the sequence is sharded and gathered: "default", which classes have that spar has verified;
            or as diffusers' `_cp_plan`, where an int may stand for its entries: `{module: {argument or output
            index: dim}}` shards, `{module: dim}` gathers.
        method: of attention: "ulysses", "gather", "ring" or "hybrid", as of `spar.shard_model`; None chooses
            for each. Without a plan only.
        strict: whether a function inside blocks that would run whole raises. Without a plan only.

    Returns:
        The report of what runs whole, and of the share of work, which the first forward fills; None with a
        plan.

    Raises:
        ImportError: diffusers is not installed, or its version lacks a name that spar uses.
        ValueError: the model is enabled already, the plan does not match it, or it is an autoencoder whose
            decoder or encoder has no 2-D or 3-D convolutions, as of sound. The model is unchanged.
        TypeError: an argument is of another type.
    """
    where = _WHERE
    names = load()
    inner = [name for name in _OF_PIPELINES if isinstance(getattr(model, name, None), torch.nn.Module)]
    if inner and not isinstance(model, torch.nn.Module):
        expected = " and ".join(f"pipe.{name}" for name in inner)
        raise TypeError(
            f"{where}: model is a {type(model).__name__}; expected a model in it: pass {expected}"
        )
    check_module(model, where)
    if _STATE in vars(model) or is_sharded(model):
        raise ValueError(f"{where}: the model is enabled already; call disable(model) first")
    if getattr(model, "_parallel_config", None) is not None:
        raise ValueError(
            f"{where}: diffusers' own enable_parallelism was called; expected a model without it"
        )
    coders = _coders(model)
    if plan is None:
        around = functools.partial(kernels_of_parts, names)
        options: dict[str, Any] = {"method": method, "strict": strict, "around": around}
        if not coders:
            return sharded(model, group, where, **options)
        vars(model)[_STATE] = made = _ShardedCoders(coders, group, options)
        return made.report
    if coders:
        raise ValueError(f"{where}: plan is {plan!r:.200}; expected None for {type(model).__name__}")
    if method is not None or strict:
        raise ValueError(f"{where}: method is {method!r} and strict {strict}; expected neither with a plan")
    rules = rules_of(model, default_plan(model) if plan == "default" else plan, names)
    modules = _attention_modules(model, names)
    vars(model)[_STATE] = _Sharded(model, process_group(group, where), names, rules, modules)
    return None


def disable(model: torch.nn.Module) -> None:
    """Undo `enable`: restore the model's forward, its processors and hooks; empty its cache of diffusers.

    Raises:
        ValueError: the model is not enabled, or its forward was replaced after `enable`.
    """
    state = vars(model).get(_STATE) if isinstance(model, torch.nn.Module) else None
    if state is not None:
        state.remove()
        del vars(model)[_STATE]
    elif isinstance(model, torch.nn.Module) and is_sharded(model):
        unsharded(model, "diffusers.disable")
        if getattr(model, "is_cache_enabled", False):
            model._reset_stateful_cache()  # type: ignore[operator] # it holds parts
    else:
        raise ValueError("diffusers.disable: the model is not enabled; expected one that enable changed")


def _coders(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the decoder and the encoder of an autoencoder, which its `decode` and `encode` call.

    A transformer has none. Raises for an autoencoder without a decoder of images.
    """
    if not callable(getattr(model, "decode", None)):
        return []
    found = {name: getattr(model, name, None) for name in ("decoder", "encoder")}
    coders = {name: coder for name, coder in found.items() if isinstance(coder, torch.nn.Module)}
    convolved = {name for name, coder in coders.items() if has_convolutions(coder)}
    if "decoder" not in convolved or len(convolved) < len(coders):
        lacking = next(name for name in found if name not in convolved)
        raise ValueError(
            f"{_WHERE}: {type(model).__name__} has no {lacking} of 2-D or 3-D convolutions, whose rows "
            "could be sharded; expected an autoencoder of images or videos"
        )
    return [*coders.values()]


class _ShardedCoders:
    """What `enable` changed in an autoencoder."""

    def __init__(self, coders: list[torch.nn.Module], group: Group, options: dict[str, Any]) -> None:
        if options["method"] == "hybrid":
            raise ValueError(f'{_WHERE}: method is "hybrid"; expected another for an autoencoder, of rows')
        self.report: Report | None = None
        self.coders = coders
        for coder in coders:
            check_module(coder, _WHERE)
            if is_sharded(coder):
                raise ValueError(
                    f"{_WHERE}: the model's {type(coder).__name__} is sharded already; undo that"
                )
        for coder in coders:
            self.report = sharded(coder, group, _WHERE, blocks=[""], report=self.report, **options)

    def remove(self) -> None:
        for coder in self.coders:
            unsharded(coder, "diffusers.disable")


def _attention_modules(model: torch.nn.Module, names: Names) -> dict[str, torch.nn.Module]:
    """Return the modules that have an attention processor; check that spar knows how each attends."""
    modules = {}
    for name, module in model.named_modules():
        processor = getattr(module, _PROCESSOR, None)
        if processor is None or not callable(processor):
            continue
        kind = type(processor).__name__
        if "IPAdapter" in kind or not (
            hasattr(processor, BACKEND) or isinstance(processor, names.joint_processors)
        ):
            joint = ", ".join(joint_kind.__name__ for joint_kind in names.joint_processors)
            raise ValueError(
                f"diffusers.enable: the processor of {name} is a {kind}; expected one without an IP adapter "
                f"that calls diffusers' attention dispatcher, or {joint}"
            )
        modules[name] = module
    if not modules:
        raise ValueError(
            f"diffusers.enable: {type(model).__name__} has no attention processors; expected a transformer "
            "of diffusers, such as pipe.transformer"
        )
    return modules


class _Sharded:
    """What `enable` changed in a model."""

    def __init__(
        self,
        model: torch.nn.Module,
        group: Any,
        names: Names,
        rules: list[Rule],
        modules: Mapping[str, torch.nn.Module],
    ) -> None:
        self.model = model
        self.group = group
        self.names = names
        self.attention = ShardedAttention(group)
        self.parameters = argument_names(model)
        self.agreement = Agreement(group, model)
        self.root = [rule for rule in rules if rule.module is model]
        self.backends: dict[Any, Any] = {}  # maps the backend that a processor had to spar's
        self.processors: list[tuple[str, torch.nn.Module, Any]] = []  # the name, the module, its processor
        self.undo = contextlib.ExitStack()  # restores the model
        for rule in rules:
            if rule.module is not model:
                self._hook(rule)
        for name, module in modules.items():
            self._enter(name, module)
        self.forward = model.forward
        self.sharded = functools.update_wrapper(functools.partial(self.run), self.forward)
        self._set(model, "forward", self.sharded)

    # ---- what is changed, and restored ----

    def _set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until `remove`."""
        before = vars(owner).get(name, _ABSENT)

        def restore() -> None:
            if name == _PROCESSOR and getattr(owner, name) is not value:
                return  # the caller set another one
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        setattr(owner, name, value)
        self.undo.callback(restore)

    def _hook(self, rule: Rule) -> None:
        module = rule.module
        if rule.arguments:

            def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                return self._shard_arguments(rule, args, kwargs)

            self.undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        if rule.outputs or rule.gathered:

            def after(_: Any, args: tuple[Any, ...], output: Any) -> Any:
                return self._convert(rule, output)

            self.undo.callback(module.register_forward_hook(after).remove)

    def _enter(self, name: str, module: torch.nn.Module) -> None:
        """Let an attention module attend over the whole sequence."""
        parameters = argument_names(module)
        at = parameters.index(TEXT) if TEXT in parameters else len(parameters)

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            text = args[at] if at < len(args) else kwargs.get(TEXT)
            self.attention.text = text.size(1) if isinstance(text, torch.Tensor) else None

        self.undo.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        processor = getattr(module, _PROCESSOR)
        if not hasattr(processor, BACKEND):
            processor = JointProcessor(processor, self.attention)
            self._set(module, _PROCESSOR, processor)
        elif (inner := getattr(processor, BACKEND)) not in self.backends.values():  # modules may share it
            if inner not in self.backends:
                self.backends[inner] = register_backend(self.names, self.attention, inner)
                self.undo.callback(unregister_backend, self.names, self.backends[inner])
            self._set(processor, BACKEND, self.backends[inner])
        self.processors.append((name, module, processor))

    def remove(self) -> None:
        if vars(self.model).get("forward") is not self.sharded:
            raise ValueError(
                "diffusers.disable: the model's forward was replaced after enable; expected that one's; "
                "undo what replaced it first"
            )
        self.undo.close()

    # ---- forward ----

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's forward over the ranks."""
        with Call(ranks_of(self.group, ""), "a sharded model's forward", MOST_EXCHANGES) as call:
            try:
                return self._run(args, kwargs)
            except BaseException:
                call.device = next((p.device.type for p in self.model.parameters()), None)
                raise
            finally:
                self.attention.sequences = None

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_unchanged()
        sequences = self.attention.sequences = Sequences(self.group)
        try:
            compares = not torch.compiler.is_compiling()
            if compares:
                device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
                self.agreement.begin(dict(zip(self.parameters, args, strict=False)) | kwargs, device)
            for rule in self.root:
                args, kwargs = self._shard_arguments(rule, args, kwargs)
            output = self.forward(*args, **kwargs)
            for rule in self.root:
                output = self._convert(rule, output)
            if compares:
                self.agreement.end(0)
            return output
        except RuntimeError as error:
            place, empty = self.attention.place, sequences.empty()
            if is_reported(error) or not empty:
                raise
            raise ValueError(
                f"a sharded model's forward on rank {place.rank} of {place.world}: the rank has no token of "
                f"{', '.join(empty)}, which the model's own code may not support ({error}); expected at "
                f"least {place.world} tokens, one for each rank"
            ) from error

    def _check_unchanged(self) -> None:
        """Check that no processor or backend was set since: it would attend to this rank's tokens only."""
        if getattr(self.model, "is_cache_enabled", False):
            raise ValueError(
                "a sharded model's forward: the model has a cache; expected none, because it decides by this "
                "rank's tokens: call disable_cache()"
            )
        for name, module, processor in self.processors:
            is_joint = isinstance(processor, JointProcessor)
            is_ours = is_joint or getattr(processor, BACKEND) in self.backends.values()
            if getattr(module, _PROCESSOR) is not processor or not is_ours:
                raise ValueError(
                    f"a sharded model's forward: the processor or attention backend of {name} was set after "
                    "enable; call disable(model), set it, and enable(model)"
                )

    def _shard_arguments(
        self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.attention.sequences is None:
            return args, kwargs
        positional, kwargs = list(args), dict(kwargs)
        for name, part in rule.arguments.items():
            at = rule.parameters.index(name)
            if name in kwargs:
                kwargs[name] = self._shard(kwargs[name], part, name, rule)
            elif at < len(positional):
                positional[at] = self._shard(positional[at], part, name, rule)
        return tuple(positional), kwargs

    def _convert(self, rule: Rule, output: Any) -> Any:
        """Shard or gather a module's outputs."""
        if self.attention.sequences is None:
            return output
        single = isinstance(output, torch.Tensor)
        if isinstance(output, Mapping):  # a dataclass of diffusers
            return type(output)(**dict(zip(output, self._apply(rule, list(output.values())), strict=True)))
        outputs = self._apply(rule, [output] if single else list(output))
        return outputs[0] if single else outputs if isinstance(output, list) else tuple(outputs)

    def _apply(self, rule: Rule, outputs: list[Any]) -> list[Any]:
        for i, part in rule.outputs.items():
            if i >= len(outputs):
                raise self._error(rule, f"{len(outputs)} outputs", f"more than {i}, which the plan shards")
            outputs[i] = self._shard(outputs[i], part, f"{rule.name}[{i}]", rule)
        if rule.gathered and len(rule.gathered) != len(outputs):
            raise self._error(rule, f"{len(outputs)} outputs", f"{len(rule.gathered)}, as in the plan")
        for i, gathered in enumerate(rule.gathered):
            if gathered is not None:
                outputs[i] = self._gather(outputs[i], gathered, rule)
        return outputs

    def _shard(self, x: Any, part: Part, name: str, rule: Rule) -> Any:
        if x is None:
            return None
        if not isinstance(x, torch.Tensor):
            raise self._error(rule, f"{name} is a {type(x).__name__}", "a tensor")
        if part.ndim is not None and x.dim() < part.ndim:
            return x  # one value for all tokens, such as a timestep of each sample
        if x.dim() > (part.ndim or x.dim()) or not -x.dim() <= part.dim < x.dim():
            expected = f"{part.ndim} dims" if part.ndim is not None else f"a dim {part.dim}"
            raise self._error(rule, f"{name} is of shape {list(x.shape)}", expected)
        assert self.attention.sequences is not None
        layout = self.attention.sequences.add(name, x.size(part.dim))
        return layout.shard(x, part.dim, "down" if x.is_floating_point() else None)

    def _gather(self, x: Any, part: Part, rule: Rule) -> Any:
        sequences = self.attention.sequences
        if not isinstance(x, torch.Tensor) or not -x.dim() <= part.dim < x.dim():
            actual = f"of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise self._error(rule, f"its output is {actual}", f"a tensor with a dim {part.dim}")
        assert sequences is not None
        layout = sequences.layout_of(x.size(part.dim))
        if layout is None:
            actual = f"its output has {x.size(part.dim)} tokens"
            raise self._error(rule, actual, f"this rank's shard of a sequence of the plan ({sequences})")
        whole: torch.Tensor = layout.gather(x, part.dim, "up")
        if whole.requires_grad:  # backward begins here: checkpoints before it recompute this forward
            whole.register_hook(functools.partial(self._resume, sequences))
        return whole

    def _resume(self, sequences: Sequences, _: torch.Tensor) -> None:
        self.attention.sequences = sequences

    def _error(self, rule: Rule, actual: str, expected: str) -> ValueError:
        place = self.attention.place
        module = f"module {rule.name!r}" if rule.name else "the model"
        return ValueError(
            f"a sharded model's forward on rank {place.rank} of {place.world}: at {module} {actual}; "
            f"expected {expected}"
        )
