# SPDX-License-Identifier: Apache-2.0
"""Train a model of transformers with long sequences on the GPUs of a host, several for each sequence.

    torchrun --nproc-per-node 8 examples/gpus.py                                # a Llama of random weights
    torchrun --nproc-per-node 8 examples/gpus.py --check --tokens 4096          # compare it with one rank
    torchrun --nproc-per-node 8 examples/gpus.py FOLDER --dp 2 --tokens 131072  # 2 sequences, 4 GPUs for each

The lines are the same for one GPU, for several, and without GPUs, where the model is small. It trains on one
batch of random tokens. Not yet verified on hardware.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import spar

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = {
    "cuda": "cpu:gloo,cuda:nccl",
    "cpu": "gloo",
}  # nccl alone may end the process where a rank is missing
TOKENS = {"cuda": 32_768, "cpu": 500}
SIZES = {
    "cuda": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "cpu": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TOLERANCE = {"bfloat16": 0.1, "float32": 1e-3}  # relative, of all gradients


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="its folder or name; by default a Llama with random weights")
    parser.add_argument("--dp", type=int, default=1, help="sequences at once; the ranks of each share it (1)")
    parser.add_argument("--tokens", type=int, default=TOKENS[DEVICE], help="of a sequence (%(default)s)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of forward and backward")
    parser.add_argument("--check", action="store_true", help="compare the first step with one rank")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --nproc-per-node 8 examples/gpus.py")
    if args.dp < 1 or int(os.environ["WORLD_SIZE"]) % args.dp:
        parser.error(f"--dp must divide the number of ranks, {os.environ['WORLD_SIZE']}, got {args.dp}")
    return args


def make_model(args: Namespace) -> Any:
    """Return the model in float32 on this rank's device, with equal weights on all ranks."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        if args.model is None:
            config = LlamaConfig(**SIZES[DEVICE], max_position_embeddings=args.tokens, use_cache=False)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, use_cache=False)
    return model.to(DEVICE).train()


def shard_parameters(model: Any, dtype: torch.dtype) -> None:
    """Shard the parameters over all ranks by FSDP2, layer by layer; it averages gradients in float32."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def gradients_of_one_rank(model: Any, batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what each rank finds alone, without spar, in a copy of the model."""
    one = copy.deepcopy(model).to(dtype)
    one(**batch).loss.backward()
    return {name: p.grad for name, p in one.named_parameters() if p.grad is not None}


def relative_difference(model: Any, expected: dict[str, Tensor]) -> float:
    """Return how far the gradients of all parameters together are from those expected."""
    squares = torch.zeros(2, device=DEVICE)
    for name, p in model.named_parameters():
        if name in expected:
            found, known = p.grad.full_tensor().float(), expected[name].float()
            squares += torch.stack([(found - known).square().sum(), known.square().sum()])
    return float((squares[0] / squares[1]).sqrt())


def memory() -> str:
    return f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if DEVICE == "cuda" else ""


def main() -> None:
    args = parse_arguments()
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before anything else uses a GPU
    dist.init_process_group(BACKEND[DEVICE])
    rank, world, dtype = dist.get_rank(), dist.get_world_size(), DTYPES[args.dtype]
    mesh = init_device_mesh(DEVICE, (args.dp, world // args.dp), mesh_dim_names=("dp", "cp"))
    dp, cp = mesh["dp"], mesh["cp"]

    model = make_model(args)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (args.dp, args.tokens), generator=torch.Generator().manual_seed(1))
    samples = ids.to(DEVICE)  # in place of a data loader
    mine = samples[dp.get_local_rank()][None]  # whole, and equal on all ranks of cp

    model.gradient_checkpointing_enable()  # keeps the hidden states between layers alone until backward
    batch = {"input_ids": samples, "labels": samples}
    expected = gradients_of_one_rank(model, batch, dtype) if args.check else {}
    report = spar.parallelize(model, cp, outputs="parts")  # the one call; no tensor of all logits
    shard_parameters(model, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)

    for step in range(args.steps):
        begin = time.perf_counter()
        loss: Tensor = model(input_ids=mine, labels=mine).loss
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=dp.get_group())
        if step == 0 and args.check:
            error, most = relative_difference(model, expected), TOLERANCE[args.dtype]
            if not error < most:
                sys.exit(f"gradients differ from one rank by {error:.0e}, relative; allowed: {most:.0e}")
            if rank == 0:
                print(f"checked: gradients differ from one rank by {error:.0e}, relative")
            expected.clear()
        optimizer.step()
        optimizer.zero_grad()
        value = mean.item() / args.dp  # waits for the device
        speed = args.dp * args.tokens / (time.perf_counter() - begin)
        if rank == 0:
            print(f"step {step}: loss {value:.4f}, {speed:,.0f} tokens/s{memory()}")
    if rank == 0:
        transport = spar.transport(cp.get_group(), DEVICE)
        print(f"{args.dp} dp x {world // args.dp} cp on {DEVICE}; {transport.name}: {transport.reason}")
        print(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
