"""A causal language model of transformers, built from its config; nobody edits its code.

    model = TransformersAdapter(workload).build(plan, device)

Attention, tying, padding and checkpointing go through transformers' own switches. The loss is computed here and once:
labels are never handed to the model, which would compute its own. Two things have no switch: the stream between the
blocks takes the type of what enters the first of them, which a hook casts, and a tanh GELU is a module that can be
exchanged. What is dropped in training the workload's config says (workloads/resolve.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

from redline.core.errors import ModelError, UserError
from redline.core.plan import Plan
from redline.core.user_code import first_line
from redline.core.workload import Workload
from redline.model.adapter import DTYPES, Adapter, LossOf, exchange_gelus, fused_head
from redline.model.gpt import hide_padding
from redline.model.loss import next_token_loss

# Their SDPA under a name of ours. For its own name transformers makes a mask whenever it is traced (torch before 2.14),
# and no fused kernel takes one: a name without a function for masks gets none, and SDPA is told to be causal. Which
# kernel runs, engine/build.py has pinned; that a causal softmax is all there is, `Workload.cannot` has made sure.
CAUSAL = "redline_causal"
ATTENTION = {"naive": "eager", "flash": CAUSAL, "cudnn": CAUSAL}
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


class TransformersAdapter(Adapter):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._initial: dict[str, torch.Tensor] | None = None

    def build(self, plan: Plan, device: torch.device) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            model = self._plain(plan)
            if plan.vocab_multiple > 1:
                pad_vocabulary(model, self.workload.decoder.vocab, plan.vocab_multiple)
        if plan.residual != "fp32":
            cast_stream(model, DTYPES[plan.residual])
        if plan.gelu == "sigmoid":
            exchange_gelus(model, is_tanh_gelu)
        if plan.checkpointing == "full":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._initial = {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}
        return model

    def _plain(self, plan: Plan) -> PreTrainedModel:
        """As transformers makes it, from the workload's seed. The head is drawn last, so that tied and untied models
        start alike."""
        AttentionInterface.register(CAUSAL, sdpa_attention_forward)
        torch.manual_seed(self.workload.seed)
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                self._config(plan), attn_implementation=ATTENTION[plan.attention], dtype=torch.float32
            )
        except (ValueError, AssertionError, KeyError) as error:
            raise refused(error, self.workload.source.config or {}) from error
        return model.train()

    def _config(self, plan: Plan) -> Any:
        assert self.workload.source.config is not None
        settings = dict(self.workload.source.config)
        try:
            config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        except Exception as error:  # its own classes for what it finds wrong are not public
            raise refused(error, self.workload.source.config or {}) from error
        text = config.get_text_config()
        text.tie_word_embeddings = config.tie_word_embeddings = plan.tied
        text.use_cache = False  # keys and values of a step are of no use to the next
        return text

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

    def fill_buffers(self, model: nn.Module) -> None:
        """Masks and frequencies: no step changes them."""

    def draw(self, model: nn.Module, name: str, whole: torch.Tensor) -> None:
        assert self._initial is not None, "build comes first"
        whole.copy_(self._initial[name])

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        assert self._initial is not None, "build comes first"
        for name, parameter in model.named_parameters():
            parameter.copy_(self._initial[name])

    def loss_of(self, model: nn.Module, plan: Plan) -> LossOf:
        assert isinstance(model, PreTrainedModel)
        if plan.loss == "full":
            return lambda inputs, targets: next_token_loss(model(input_ids=inputs).logits, targets)
        features, head, loss_of_head = model.base_model, head_of(model), fused_head(plan, self.workload.decoder.vocab)
        return lambda inputs, targets: loss_of_head(features(input_ids=inputs).last_hidden_state, head.weight, targets)

    def unpadded(self, model: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, PreTrainedModel)
        tables = {id(model.get_input_embeddings().weight), id(head_of(model).weight)}
        padded = id(model.get_parameter(name)) in tables
        return tensor[: self.workload.decoder.vocab] if padded else tensor

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """A model that drops nothing stays as it is: compiled code would be compiled again for the other mode."""
        if not drops(model):
            yield
            return
        model.eval()
        try:
            yield
        finally:
            model.train()


def refused(error: Exception, config: dict[str, Any]) -> ModelError:
    text = first_line(error, type(error).__name__)
    why = text
    if isinstance(error, KeyError):  # such as a rope_type that is newer than it; or a sentence
        field = field_of(error.args[0], config)
        why = str(error.args[0]) if field is None else f"{field} is {text}, and it knows no such one"
    fix = "repair it, or install a newer transformers; `redline estimate` reads its sizes alone"
    return ModelError("transformers cannot build the config", why, fix)


def field_of(value: object, config: dict[str, Any]) -> str | None:
    """Where a config has it, 'rope_type in rope_parameters'; None where it has it nowhere."""
    for key, each in config.items():
        if each == value:
            return key
        if isinstance(each, dict) and (inner := field_of(value, each)):
            return f"{inner} in {key}"
    return None


def drops(model: nn.Module) -> bool:
    """By its layers, not by its config, which may name what the code does not have."""
    layers = model.modules()
    return any((isinstance(m, nn.Dropout) and m.p > 0) or getattr(m, "attention_dropout", 0.0) for m in layers)


def head_of(model: PreTrainedModel) -> nn.Linear:
    head: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"{type(model).__name__} has no linear head",
            "redline trains causal language models, whose last layer gives a logit per token",
            "point at the config of a causal language model",
        )
    return head


@torch.no_grad()
def pad_vocabulary(model: PreTrainedModel, vocab: int, multiple: int) -> None:
    """Rows that are never looked up and whose logits are -inf: the loss is the unpadded model's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice for those who add tokens to a trained model
        model.resize_token_embeddings(vocab, pad_to_multiple_of=multiple, mean_resizing=False)
    for table in (model.get_input_embeddings(), head_of(model)):
        table.get_parameter("weight")[vocab:].zero_()
    if head_of(model).out_features > vocab:
        device = head_of(model).weight.device
        with device:
            hide_padding(head_of(model), vocab)


def cast_stream(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """What enters the first block is what all of them add to; under autocast their branches are `dtype` already. Not
    what the embedding gives: some models scale that, by a factor that 16 bits would round."""
    first = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    first.register_forward_pre_hook(lambda _module, inputs: (inputs[0].to(dtype), *inputs[1:]))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):  # in fp32, as a GPU's autocast has it and a CPU's has not
            module.register_forward_pre_hook(lambda _module, inputs: (inputs[0].float(),))


def is_tanh_gelu(module: nn.Module) -> bool:
    return isinstance(module, tuple(type(ACT2FN[name]) for name in TANH_GELUS))
