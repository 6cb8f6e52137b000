"""A candidate that trains GPT-2 at one micro batch, in a process that takes turns: ours, nanoGPT's or transformers'.

    python benchmarks/contestants.py ORDER.json      # started by against.py, which talks to it through pipes

The process receives a line with a number of steps and answers with a line of JSON with their times. Between two blocks
it returns its memory.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import nn

from redline.core.errors import UserError
from redline.core.values import from_json
from redline.core.workload import Workload
from redline.data.batches import TokenBatches, stream_batches
from redline.engine import memory
from redline.engine.build import build_step
from redline.engine.clock import Clock
from redline.optim import warm_up
from redline.rungs import plan_of

NANOGPT, NO_BIAS, TRANSFORMERS, OURS = CANDIDATES = ("nanogpt", "nanogpt-no-bias", "transformers", "redline")
SETTINGS = ("learning_rate", "weight_decay", "beta1", "beta2", "grad_clip", "dropout", "warmup_iters")  # of train.py
VOCAB_MULTIPLE = 64  # nanoGPT's own padding: 50304 rows, the same as ours
TOKENS_FILE = "tokens.npy"
READY_STEPS, BLOCK_WARM_STEPS = 2, 2
OUT_OF_MEMORY = "out of memory"

Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Order:
    """One candidate at one size: what a child process reads."""

    candidate: str
    workload: Workload
    rungs: tuple[str, ...]
    """Our rungs. The other candidates take only the number of loader workers from them."""
    micro_batch: int
    device: str
    compiled: bool
    """True to compile the other candidates; ours compiles if the recipe says so."""
    nanogpt: str | None = None
    label: str | None = None
    """The name to use where one candidate plays with several recipes."""
    switches: dict[str, Any] = field(default_factory=dict)
    """Settings of the compiler, by their names in torch._inductor.config."""

    @property
    def name(self) -> str:
        return f"{self.label or self.candidate}-{self.micro_batch}"

    @property
    def records(self) -> bool:
        """True if the step replays CUDA graphs."""
        return self.candidate == OURS and plan_of(self.rungs).cuda_graphs

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.workload.decoder.sequence


def play(path: Path) -> int:
    """Answer until the parent closes its end. What other code prints (nanoGPT does) goes to the log."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    try:
        runner = Runner(from_json(Order, json.loads(path.read_text(encoding="utf-8"))), path.parent / TOKENS_FILE)
        answer(runner.said)
        for line in sys.stdin:
            answer(runner.block(int(line)))
    except (RuntimeError, MemoryError) as error:
        if not memory.is_out_of_memory(error):
            raise
        answer({"reason": OUT_OF_MEMORY})
        return 1
    return 0


class Runner:
    """A candidate at a size, compiled and on the device."""

    def __init__(self, order: Order, tokens: Path) -> None:
        started = time.perf_counter()
        self.order, self.device = order, torch.device(order.device)
        for name, value in order.switches.items():
            setattr(inductor, name, value)
        self.step, model = STEPS[order.candidate](order, self.device)
        workload = order.workload
        batches = TokenBatches(
            path=tokens, micro_batch=order.micro_batch, sequence=workload.decoder.sequence, seed=workload.seed
        )
        self.batches = stream_batches(batches, self.device, plan_of(order.rungs).loader_workers)
        first = self.step(next(self.batches)).item()
        for _ in range(READY_STEPS):
            self.step(next(self.batches))
        self._rest()
        self.said = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "loss_first": first,
            "ready_seconds": time.perf_counter() - started,
        }

    def block(self, steps: int) -> dict[str, Any]:
        """Time a block of steps. The first ones allocate memory again and are not timed."""
        for _ in range(BLOCK_WARM_STEPS):
            self.step(next(self.batches))
        memory.reset_peak(self.device)
        clock = Clock(self.device)
        clock.mark()
        for _ in range(steps):
            loss = self.step(next(self.batches))
            clock.mark()
        found = {
            "seconds": clock.seconds(),
            "peak_bytes": memory.peak_bytes(self.device, recorded=self.order.records),
            "loss": loss.item(),
        }
        self._rest()
        return found

    def close(self) -> None:
        self.batches.close()

    def _rest(self) -> None:
        """Return memory, so that all fit on one card: a resting process keeps only weights and optimizer there."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


# the candidates


def our_step(order: Order, device: torch.device) -> tuple[Step, nn.Module]:
    step = build_step(order.workload, replace(plan_of(order.rungs), read_loss_every=0), device=device)
    return step, step.model


def nanogpt_step(order: Order, device: torch.device) -> tuple[Step, nn.Module]:
    """Return nanoGPT's loop, with one micro batch per update."""
    assert order.nanogpt is not None
    settings, code, shape = (
        read_settings(Path(order.nanogpt)),
        import_model(Path(order.nanogpt)),
        order.workload.decoder,
    )
    torch.set_float32_matmul_precision("high")  # nanoGPT sets both of torch's allow_tf32
    torch.manual_seed(order.workload.seed)
    config = code.GPTConfig(
        block_size=shape.positions_count,
        vocab_size=padded(shape.vocab),
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.d_model,
        dropout=settings["dropout"],
        bias=order.candidate == NANOGPT,
    )
    model = code.GPT(config).to(device)
    rate, betas = settings["learning_rate"], (settings["beta1"], settings["beta2"])
    optimizer = model.configure_optimizers(settings["weight_decay"], rate, betas, device.type)
    run = torch.compile(model) if order.compiled else model
    step = plain_step(
        model,
        optimizer,
        lambda batch: run(batch[0], batch[1])[1],
        clip_norm=settings["grad_clip"],
        learning_rate=lambda taken: rate * min((taken + 1) / (settings["warmup_iters"] + 1), 1.0),
    )
    return step, model


def transformers_step(order: Order, device: torch.device) -> tuple[Step, nn.Module]:
    from transformers import AutoModelForCausalLM, GPT2Config

    workload, shape = order.workload, order.workload.decoder
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(workload.seed)
    config = GPT2Config(
        vocab_size=padded(shape.vocab),
        n_positions=shape.positions_count,
        n_embd=shape.d_model,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).train()
    rate = workload.learning_rate
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=workload.weight_decay, fused=True
    )
    run = torch.compile(model) if order.compiled else model
    step = plain_step(
        model,
        optimizer,
        lambda batch: run(input_ids=batch[0], labels=batch[0]).loss,  # the model shifts the labels itself
        clip_norm=workload.clip_norm,
        learning_rate=lambda taken: warm_up(taken, peak=rate, warmup_steps=workload.warmup_steps),
    )
    return step, model


STEPS: dict[str, Callable[[Order, torch.device], tuple[Step, nn.Module]]] = {
    NANOGPT: nanogpt_step,
    NO_BIAS: nanogpt_step,
    TRANSFORMERS: transformers_step,
    OURS: our_step,
}


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    clip_norm: float,
    learning_rate: Callable[[int], float],
) -> Step:
    """Return a step of the loop that nanoGPT and transformers share, with none of our code in it."""
    device, taken = next(model.parameters()).device, iter(range(sys.maxsize))

    def step(batch: torch.Tensor) -> torch.Tensor:
        rate = learning_rate(next(taken))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def padded(vocab: int) -> int:
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def read_settings(folder: Path) -> dict[str, float]:
    """Return the literal numbers that nanoGPT's train.py sets, without running any of it."""
    with explaining(folder / "train.py"):
        tree = ast.parse((folder / "train.py").read_text(encoding="utf-8"))
    found: dict[str, float] = {}
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        ):
            found[node.targets[0].id] = node.value.value  # type: ignore[assignment]
    lacks = [name for name in SETTINGS if name not in found]
    if lacks:
        raise UserError(
            f"{folder / 'train.py'} does not set {', '.join(lacks)}",
            "nanoGPT's train.py does: this is another program",
            "give a checkout of karpathy/nanoGPT",
        )
    return {name: found[name] for name in SETTINGS}


def import_model(folder: Path) -> ModuleType:
    path = folder / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    with explaining(path):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot read {path}", error.strerror or str(error), "give a checkout of karpathy/nanoGPT: --nanogpt DIR"
        ) from error


if __name__ == "__main__":
    raise SystemExit(play(Path(sys.argv[1])))
