# SPDX-License-Identifier: Apache-2.0
"""Turn a whole batch into this rank's part of it, with everything that depends on the whole."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..._attention.spans import Spans
from ..._checks import digest
from ..._group.registry import group_of, place_of
from ...errors import MismatchError
from ...groups import init
from ...ops.gather import all_gather
from ...sequence_layout import SequenceLayout
from ...topology.resolve import Group, process_group
from . import given_masks, heads
from .given_masks import is_padding, kept_apart
from .masks import documents_of, lengths_by_sample, lengths_of, masks_of, restarting
from .mixers import Mixer, accepted, carries, mask_kinds, mixers_of, with_layout
from .models import check_known_without_whole, checked_config, has_dropout, unknown_kinds
from .router import Routed, Router, has_router_loss
from .scans import BY_HEADS_ALONE
from .sources import has_attention, masks_of_forward, needs_mask
from .tokens import SCAN_CHOICES, Carried, Tokens
from .whole import check_router, inside, install, modules_of

NAME = "transformers.shard"
_IDS = ("input_ids", "inputs_embeds")
_SEQUENCES = ("token_type_ids",)  # [B, S], besides those that have a meaning below
_OTHERS = ("position_ids", "attention_mask", "labels", "shift_labels", "num_items_in_batch")
_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_PLAIN = ("return_dict", "output_hidden_states")  # the same for each token
_MOST_EXCHANGES = 100  # of one call on a group
_IGNORED = -100  # the label of a token that does not count


class Sharding:
    """One call: where its exchanges are, and which of them is under way."""

    def __init__(self, model: Any, group: dist.ProcessGroup, token_group: Group, name: str = NAME) -> None:
        self.model = model
        self.name = name
        self.group = group
        self.place = place_of(group)
        self.tokens = None if token_group is None else process_group(token_group, name)
        self.head = None if model is None else heads.head_of(model)

    def error(self, name: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {name} is {value}; expected {expected}")

    @property
    def where(self) -> str:
        return f"{self.name} on rank {self.place.rank} of {self.place.world}"

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Report what fails to the ranks of each group."""
        groups = [group_of(group) for group in (self.group, self.tokens or self.group)]
        with groups[0].call(self.name, _MOST_EXCHANGES), groups[1].call(self.name, _MOST_EXCHANGES):
            yield

    def gathered(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Gather a tensor of one size [n] as [ranks, n]."""
        return all_gather(x[None], group)

    def run(
        self,
        batch: Mapping[str, Any],
        layout: SequenceLayout | None,
        method: str | None,
        scan: str | None,
        check: bool,
        patterns: Sequence[str] | None,
    ) -> dict[str, Any]:
        tokens = self.tokens_of(batch)
        total = tokens.size(1)
        positions, documents = self.positions_of(batch, layout, total)
        names = ("labels", "shift_labels", *heads.labels_of(self.head))
        learns = any(batch.get(name) is not None for name in names)
        given = batch.get("position_ids") is not None
        whole = modules_of(self.model, patterns)
        longest = int(positions.max()) + 1
        padded = _has_padding(batch.get("attention_mask"))
        config = checked_config(self.model, longest, learns, given, padded, documents is not None, whole)
        covered = inside(whole)
        mixers = [mixer for mixer in mixers_of(self.model) if mixer.module not in covered]
        self.check_scan(scan, mixers)
        if check and self.place.world > 1:
            settings = repr((layout, method, scan, sorted(whole)))
            self.compare(batch, tokens, has_dropout(self.model, config), settings)
        if layout is None:
            layout = self.default_layout(documents, total, method, config)
        self.check_layout(layout, total, documents)
        positions = positions.to(tokens.device)
        mask = given_masks.mask_of(batch.get("attention_mask"), tokens.size(0), total, self.error)
        types = batch.get("token_type_ids")
        if mask is not None and not is_padding(mask):
            if whole and not isinstance(mask, torch.Tensor):
                check_known_without_whole(self.model, config, whole)
            apart = kept_apart(mask, self.model, config, covered, longest, layout, self.error)
        else:
            apart = documents
        known = not unknown_kinds(config)
        masks = masks_of(self.model, config, tokens, mask, positions, layout, types, known)
        if whole:
            positions = positions.expand(tokens.size(0), -1)  # modules may take them by sample
            if not has_attention(self.model) and not mixers_of(self.model):
                masks = layout.shard(mask, 1).contiguous() if isinstance(mask, torch.Tensor) else None
            check_router(self.model, config, whole)
        heads.install_head(self.model)
        install(self.model, whole)
        routes = bool(getattr(config, "output_router_logits", False))
        router = self.router_of(tokens, mask, layout) if routes and has_router_loss(self.model) else None
        part: dict[str, Any] = {name: batch[name] for name in _PLAIN if name in batch}
        for name in (*_IDS, *_SEQUENCES):
            if batch.get(name) is not None:
                # embeddings are before the split: the sum over the ranks divides their gradients by it
                scale = "down" if batch[name].requires_grad else None
                part[name] = layout.shard(batch[name], 1, scale).contiguous()
        part["position_ids"] = layout.shard(positions, 1).contiguous()
        lengths = None if apart is None or layout.is_packed else lengths_by_sample(apart)
        scan = self.default_scan(mixers, tokens.device) if scan is None else scan
        own = Tokens(layout, lengths, scan)

        def around(mask: Any) -> Any:
            """Return a mask of attention with what the model passes on in no other way."""
            shape = tokens.size(0), 1, total, total
            if needs_mask(self.model, covered):
                mask = Carried(mask, own, method, shape)
            return mask if router is None else Routed(mask, shape, router)

        # a caller who passes one of these besides is told by Python
        passed = accepted(self.model, config, masks, around)
        if carries(self.model, mixers):
            kinds = mask_kinds(config) if masks_of_forward(self.model).by_kind else None
            passed = with_layout(passed, kinds, own)
        elif mixers:
            others = {"documents": lengths, "scan": scan}
            part |= {name: value for name, value in others.items() if value is not None}
        part |= {"attention_mask": passed, "past_key_values": None, "use_cache": False, "layout": layout}
        if hasattr(config, "output_router_logits"):
            part["output_router_logits"] = routes
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            part["logits_to_keep"] = 0  # all: the last ones of a shard are not those of the sequence
        if method is not None:
            part["method"] = method
        if heads.is_whole(self.head):
            return self.whole_of(batch, part)
        return part | self.labels_of(batch, tokens, layout)

    def whole_of(self, batch: Mapping[str, Any], inside: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a model whose head runs on the whole sequence."""
        count = batch.get("num_items_in_batch")
        valid = heads.labels_counted(str(self.head), batch)
        if count is None and valid is not None:
            # all ranks of the group have the same samples: one of them counts
            count = self.counted(valid, valid if self.place.rank == 0 else torch.zeros_like(valid))
        names = (*_IDS, *_SEQUENCES, *_PLAIN, "position_ids", "attention_mask", *heads.labels_of(self.head))
        return heads.whole_part(batch, inside, names, _PLAIN, count)

    def tokens_of(self, batch: Any) -> torch.Tensor:
        """Check the batch's names and shapes; return what has a token in each row and column."""
        if not isinstance(batch, Mapping):
            raise TypeError(f"{self.where}: batch is a {type(batch).__name__}; expected a dict")
        names = {*_IDS, *_SEQUENCES, *_OTHERS, *_FLASH, *_PLAIN, *heads.labels_of(self.head)}
        if self.head is not None:
            names -= {"labels", "shift_labels"} - {*(heads.labels_of(self.head) or ("labels",))}
        for name in batch:
            if name not in names and batch[name] is not None:
                raise self.error(
                    f"batch[{name!r}]",
                    f"a {type(batch[name]).__name__}",
                    "none: shard does not know how it lies on the ranks. Remove it, or shard it yourself",
                )
        inputs = [batch[name] for name in _IDS if batch.get(name) is not None]
        if len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor) or inputs[0].dim() < 2:
            raise self.error("batch", f"{sorted(batch)}", "input_ids [B, S] or inputs_embeds [B, S, D]")
        shape = list(inputs[0].shape[:2])
        for name in (*_SEQUENCES, *(() if heads.is_whole(self.head) else ("labels", "shift_labels"))):
            x = batch.get(name)
            if x is not None and list(x.shape) != shape:
                raise self.error(f"batch[{name!r}]", f"of shape {list(x.shape)}", f"{shape}, the whole batch")
        if min(shape) == 0:
            raise self.error("the batch", f"of shape {shape}", "at least one token")
        several = self.tokens is not None or batch.get("num_items_in_batch") is not None
        if heads.is_whole(self.head) and (
            why := heads.check_labels(str(self.head), batch, shape[0], shape[1], several)
        ):
            raise ValueError(f"{self.where}: {why}")
        whole: torch.Tensor = inputs[0]
        return whole

    def positions_of(
        self, batch: Mapping[str, Any], layout: SequenceLayout | None, total: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return position_ids of the whole sequence, [B or 1, S], and each token's document, if several."""
        ids, mask = batch.get("position_ids"), batch.get("attention_mask")
        lengths = self.document_lengths(batch, layout, total)
        if ids is None:
            positions = torch.arange(total, device="cpu")[None] if lengths is None else restarting(lengths)
        else:
            positions = ids[None] if ids.dim() == 1 else ids
            if positions.dim() != 2 or positions.size(1) != total:
                raise self.error("batch['position_ids']", f"of shape {list(ids.shape)}", f"[B, {total}]")
            zeros = (positions == 0).all(1)
            if lengths is None and mask is None and total > 1 and bool(zeros.any()):
                raise self.error(
                    "batch['position_ids']",
                    f"all zeros in sample {int(zeros.nonzero()[0])}: {total} documents of one token",
                    "positions that count up in each document, or none; if meant, cu_seq_lens_q too",
                )
        documents = documents_of(positions)
        if documents is not None and mask is not None:
            if ids is not None and is_padding(mask) and bool(mask.all()):
                raise self.error(
                    "batch['attention_mask']",
                    "all ones, and position_ids restart",
                    "none if position_ids separate packed documents: transformers' attentions differ in that",
                )
            return positions, None  # they restart behind padding, or the mask separates documents
        if lengths is not None and ids is not None:
            counted = [total] if documents is None else lengths_of(documents)
            if counted != lengths.tolist():
                expected = f"{lengths.tolist()!r:.200}, as the layout or cu_seq_lens_q"
                raise self.error("the documents of position_ids", f"{counted!r:.200}", expected)
        return positions, documents

    def document_lengths(
        self, batch: Mapping[str, Any], layout: SequenceLayout | None, total: int
    ) -> torch.Tensor | None:
        """Return the lengths of documents that the batch or the layout names, int64."""
        ends: torch.Tensor | None = batch.get("cu_seq_lens_q")
        if ends is not None and batch.get("attention_mask") is not None:
            raise self.error("batch['attention_mask']", "passed, and cu_seq_lens_q too", "one of them")
        if ends is None:
            if not isinstance(layout, SequenceLayout) or not layout.is_packed:
                return None
            ends = layout.cu_seqlens()
        if int(ends[-1]) != total:
            raise self.error("the sum of the documents' lengths", int(ends[-1]), f"{total}, as input_ids")
        return ends.diff().to(torch.int64)

    def default_layout(
        self, documents: torch.Tensor | None, total: int, method: str | None, config: Any
    ) -> SequenceLayout:
        if documents is not None and (lengths := lengths_of(documents)) is not None:
            packed = SequenceLayout.packed(lengths, self.group)
            if min(packed.sizes) > 0:
                return packed
        blocks = method in ("gather", "ring") or (
            method is None and getattr(config, "num_attention_heads", self.place.world) < self.place.world
        )
        if blocks and total >= 2 * self.place.world:
            return SequenceLayout.zigzag(total, self.group)
        return SequenceLayout.even(total, self.group)

    def check_scan(self, scan: Any, mixers: list[Mixer]) -> None:
        if scan not in (None, *SCAN_CHOICES):
            expected = f"{', '.join(repr(choice) for choice in SCAN_CHOICES)} or None"
            raise self.error("scan", f"{scan!r:.80}", expected)
        for mixer in mixers:
            if scan == "state" and mixer.functions & BY_HEADS_ALONE:
                raise self.error(
                    "scan",
                    f"'state', and {mixer.path} is a layer of Mamba 1, whose scan continues no state",
                    "'heads', 'bytes' or None",
                )

    def default_scan(self, mixers: list[Mixer], device: torch.device) -> str | None:
        """Return "bytes" if ranks are on several hosts, where bytes count; None if not."""
        if self.place.world == 1 or not any(mixer.has_scan for mixer in mixers):
            return None
        return "bytes" if len(init(self.group, device).hosts) > 1 else None

    def check_layout(self, layout: Any, total: int, documents: torch.Tensor | None) -> None:
        if not isinstance(layout, SequenceLayout):
            raise TypeError(f"{self.where}: layout is {layout!r:.200}; expected a SequenceLayout or None")
        if layout.group is not self.group:
            raise self.error("layout", f"{layout} of another group", "a layout of `group`")
        if layout.total != total:
            raise self.error("layout", layout, f"a layout of {total} tokens, the whole sequence")
        if layout.is_packed and documents is not None and lengths_of(documents) is None:
            raise self.error("layout", layout, "an even or zigzag one: the samples' documents differ")
        if min(layout.sizes) == 0:
            empty = layout.sizes.index(0)
            raise self.error(
                "layout", f"{layout}, without a token on rank {empty}", "at least one token on each rank"
            )

    def router_of(self, tokens: torch.Tensor, mask: Any, layout: SequenceLayout) -> Router:
        """Return what the router loss needs of the tokens of all ranks."""
        if mask is not None and not is_padding(mask):
            raise self.error(
                "batch['attention_mask']",
                f"{given_masks.text(mask)}, and config.output_router_logits is True",
                f"{list(tokens.shape[:2])}, which says which tokens the router loss counts",
            )
        has_group = self.tokens_have_group("")
        valid = torch.ones(tokens.shape[:2], device=tokens.device, dtype=torch.int64)
        valid = valid if mask is None else mask.to(torch.int64)
        local = layout.shard(valid, 1)
        count = self.counted(valid, local.sum())
        groups = [self.tokens] if has_group else [self.group, self.tokens]
        rows = None if mask is None else local.reshape(-1).float()
        return Router(tuple(group for group in groups if group is not None), rows, count.float())

    def labels_of(
        self, batch: Mapping[str, Any], tokens: torch.Tensor, layout: SequenceLayout
    ) -> dict[str, Any]:
        """Return this rank's labels, which were shifted before, and the number of all ranks' labels."""
        shifted, labels = batch.get("shift_labels"), batch.get("labels")
        if self.head == heads.TOKENS:
            shifted = labels  # of the token itself
        elif shifted is None and labels is not None:
            shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        if shifted is None:
            return {}
        local = layout.shard(shifted, 1).contiguous()
        shards = {"labels": local} if self.head == heads.TOKENS else {"labels": local, "shift_labels": local}
        count = batch.get("num_items_in_batch")
        if count is not None:
            return shards | {"num_items_in_batch": count}
        return shards | {"num_items_in_batch": self.counted(shifted != _IGNORED, (local != _IGNORED).sum())}

    def counted(self, valid: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return the number of valid tokens of the token group, at least 1: a loss of none is 0."""
        whole, has_group = valid.sum(), self.tokens_have_group()
        if self.tokens is not None:
            mine = local if has_group else whole
            whole = self.gathered(mine.reshape(1), self.tokens).sum()
        return whole.clamp(min=1)

    def tokens_have_group(self, other: str = "; or num_items_in_batch in the batch") -> bool:
        """Check the token group; return whether it has all ranks of the group.

        other: what may be passed instead of one.
        """
        if self.tokens is None:
            if dist.get_world_size() != self.place.world:
                raise self.error(
                    "token_group",
                    f"None, and group has {self.place.world} of {dist.get_world_size()} ranks",
                    f"the data-parallel group, or all ranks with tokens{other}",
                )
            return False
        ranks = set(dist.get_process_group_ranks(self.group))
        common = ranks & set(dist.get_process_group_ranks(self.tokens))
        if len(common) > 1 and common != ranks:
            expected = "one rank of each sequence group, or all of its ranks"
            raise self.error("token_group", f"a group with {sorted(common)} of {sorted(ranks)}", expected)
        return len(common) > 1

    def total(self, loss: Any) -> torch.Tensor:
        """Sum a loss over the ranks that have tokens."""
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.is_floating_point():
            value = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{loss!r:.200}"
            raise self.error("loss", value, "the 0-dim loss of this rank's forward")
        groups = [self.tokens] if self.tokens_have_group() else [self.group, self.tokens]
        total = loss.detach().to(torch.float64)
        for group in groups:
            if group is not None:
                total = self.gathered(total.reshape(1), group).sum()
        return total.to(loss.dtype)

    # ---- check ----

    def compare(self, batch: Mapping[str, Any], tokens: torch.Tensor, random: bool, settings: str) -> None:
        """Compare a hash of each entry of the batch over the group; and that random numbers differ."""
        names = [*_IDS, *_SEQUENCES, *_OTHERS, *_FLASH, *heads.labels_of(heads.ANSWERS)]
        values = [batch.get(name) for name in names]
        hashes = [_hash(x) for x in (*values, settings)]
        state = _generator(tokens.device) if random else None
        mine = torch.tensor([*hashes, int(random), digest(state)], device=tokens.device)
        rows = self.gathered(mine, self.group).cpu()
        differs = rows[:, :-1] != rows[0, :-1]
        if bool(differs.any()):
            columns = [*(f"batch[{name!r}]" for name in names), "layout, method, scan or whole", "dropout"]
            column = int(differs.any(0).nonzero()[0])
            ranks = tuple(differs[:, column].nonzero()[:, 0].tolist())
            raise self.mismatch(
                f"{columns[column]} of ranks {list(ranks)} differs from that of rank 0; expected one batch "
                f"on all {self.place.world} ranks of the sequence group. Pass the right `group`; sample by "
                "data-parallel rank",
                ranks,
            )
        if random and len(rows[:, -1].unique()) < len(rows):
            raise self.mismatch(
                "the model has dropout, and ranks of the sequence group would draw the same random numbers; "
                "expected other seeds. Call shard and the model inside spar.rank_seed(step, group)",
                (),
            )

    def mismatch(self, text: str, ranks: tuple[int, ...]) -> MismatchError:
        return MismatchError(
            f"{self.where}: {text}",
            op=NAME,
            group=self.group.group_name,
            rank=self.place.rank,
            ranks=ranks,
        )


def _has_padding(mask: Any) -> bool:
    """Whether the mask of a batch is not of ones alone."""
    return mask is not None and not (is_padding(mask) and bool(mask.all()))


def _hash(value: Any) -> int:
    if isinstance(value, Mapping):
        return digest([(key, _hash(value[key])) for key in sorted(value)])
    return value.digest if isinstance(value, Spans) else digest(value)


def _generator(device: torch.device) -> torch.Tensor:
    """Return the state of the generator from which a model on the device draws."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state
