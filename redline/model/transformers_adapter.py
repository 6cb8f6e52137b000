"""A causal language model of transformers, built from its config, with transformers' code unchanged.

    model = TransformersAdapter(workload).build(plan, device)

Attention, tying, padding and checkpointing use transformers' own switches. The loss is computed here, once: labels are
never passed to the model, which would compute its own. Two things have no switch. The stream between the blocks takes
the type of the first block's input, which a hook casts; and a tanh GELU is a module that can be replaced. The
workload's config sets the dropout for training (workloads/resolve.py).
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

# transformers' SDPA under a name of our own. Under its own name transformers builds a mask whenever it is traced (torch
# before 2.14), which no fused kernel accepts; a name without a mask function gets no mask, and SDPA is told to be
# causal. engine/build.py has pinned the kernel that runs, and `Workload.cannot` excludes models that need more than a
# causal softmax.
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
        """Return the model as transformers makes it, from the workload's seed. The head is drawn last, so tied and
        untied models start alike."""
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
        except Exception as error:  # transformers' own validation errors are not public classes
            raise refused(error, self.workload.source.config or {}) from error
        text = config.get_text_config()
        text.tie_word_embeddings = config.tie_word_embeddings = plan.tied
        text.use_cache = False  # training steps share no keys and values
        return text

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

    def fill_buffers(self, model: nn.Module) -> None:
        """Do nothing: masks and frequencies do not change during training."""

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
        """Switch off dropout. A model without any stays as it is: switching modes would compile its code again."""
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
    if isinstance(error, KeyError):  # the missing key, such as a rope_type that is too new, or a sentence
        field = field_of(error.args[0], config)
        why = str(error.args[0]) if field is None else f"{field} is {text}, and it knows no such one"
    fix = "repair it, or install a newer transformers; `redline estimate` reads its sizes alone"
    return ModelError("transformers cannot build the config", why, fix)


def field_of(value: object, config: dict[str, Any]) -> str | None:
    """Return where a config has this value, such as 'rope_type in rope_parameters', or None if it has it nowhere."""
    for key, each in config.items():
        if each == value:
            return key
        if isinstance(each, dict) and (inner := field_of(value, each)):
            return f"{inner} in {key}"
    return None


def drops(model: nn.Module) -> bool:
    """True if the model has dropout. Read from its layers, since a config may name dropout that the code lacks."""
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
    """Add rows that are never looked up and whose logits are -inf: the loss is the unpadded model's."""
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
    """Cast the first block's input, to which all blocks add; under autocast their branches are `dtype` already. The
    embedding's output is not cast: some models scale it by a factor that 16 bits would round."""
    first = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    first.register_forward_pre_hook(lambda _module, inputs: (inputs[0].to(dtype), *inputs[1:]))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):  # in fp32, as under a GPU's autocast but not a CPU's
            module.register_forward_pre_hook(lambda _module, inputs: (inputs[0].float(),))


def is_tanh_gelu(module: nn.Module) -> bool:
    return isinstance(module, tuple(type(ACT2FN[name]) for name in TANH_GELUS))
