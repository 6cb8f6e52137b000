"""The table of rungs: its order, what each rung changes, where each applies, and how a recipe folds into a plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from redline.core.errors import UserError
from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.rungs import LADDER, Maths, Rung, find_rung, group_of, plan_of, published_rungs, reference_plan
from redline.rungs.ladder import with_parallel, without_rung

ORDER = (
    "baseline",
    "tf32",
    "no-sync",
    "bf16",
    "fp16",
    "compile",
    "flash",
    "cudnn-attention",
    "padded-vocab",
    "tied-weights",
    "fused-adamw",
    "foreach-adamw",
    "adamw-8bit",
    "adamw-bf16",
    "adamw-bf16-kahan",
    "adafactor",
    "lion",
    "sgd-momentum",
    "muon",
    "loader-workers",
    "fused-loss",
    "bf16-residual",
    "sigmoid-gelu",
    "fused-backward",
    "packed-attention",
    "flash4-backward",
    "tuned-matmuls",
    "fused-matmuls",
    "cuda-graphs",
    "chunked-loss",
    "selective-checkpointing",
    "checkpointing",
    "budget-checkpointing",
    "max-autotune",
    "expandable-segments",
    "fp8-head",
    "fp8-linears",
    "fp8-mlps",
    *("ddp", "fsdp", "fsdp-keep", "fsdp-whole", "tensor-parallel", "pipeline-parallel", "pipeline-gpipe"),
)
RANKS = set(ORDER[ORDER.index("ddp") :])  # they need several
HALF = replace(Plan(), autocast="bf16", compile=True)  # some rungs take 16-bit inputs or compiled code
NARROW = {"fp8-head", "fp8-linears", "fp8-mlps"}  # tests/plain/test_fp8.py asks what they need
LIBRARIES = {"packed-attention", "flash4-backward", "tuned-matmuls", "fused-matmuls"}  # not torch's
# without a fused loss, without a fused backward
ONTO = {"fp8-head", "fp8-mlps", "packed-attention", "flash4-backward", "fused-matmuls"}
every_rung = pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.name)


def applying(workload, hardware, plan=HALF):
    return {rung.name for rung in LADDER if rung.needs(workload, hardware, plan) is None}


def test_the_order_is_the_ladder_of_the_readme():
    assert tuple(rung.name for rung in LADDER) == ORDER


@every_rung
def test_a_rung_explains_itself(rung):
    assert type(rung).__doc__ != Rung.__doc__
    assert len(type(rung).__doc__.split()) > 20
    assert 0 < len(rung.title) <= 40
    assert isinstance(rung.maths, Maths)


@every_rung
def test_only_the_baseline_leaves_the_plan_alone(rung):
    changed = rung.apply(Plan()) != Plan()
    assert changed == (rung.name != "baseline")


@every_rung
def test_applying_twice_is_applying_once(rung):
    assert rung.apply(rung.apply(Plan())) == rung.apply(Plan())


@every_rung
def test_an_alternative_names_an_earlier_rung_and_overrides_it(rung):
    if rung.instead_of is None:
        assert not rung.stand_in
        return
    assert ORDER.index(rung.instead_of) < ORDER.index(rung.name)
    assert rung.apply(find_rung(rung.instead_of).apply(Plan())) == rung.apply(Plan())


def test_only_tied_weights_other_optimizers_and_8_bits_change_the_maths():
    changing = [rung.name for rung in LADDER if rung.maths is Maths.CHANGES]
    other = [rung.name for rung in LADDER if rung.stand_in and rung.instead_of == "fused-adamw"]
    assert changing == ["tied-weights", *other, *sorted(NARROW)]
    bit_exact = [rung.name for rung in LADDER if rung.maths is Maths.BIT_EXACT]
    assert bit_exact == ["baseline", "no-sync", "loader-workers", "expandable-segments"]


def test_what_applies_on_an_h200(tiny, h200):
    assert applying(tiny, h200) == set(ORDER) - RANKS - ONTO
    ranked = applying(tiny, replace(h200, ranks=2), replace(HALF, optimizer="adamw-fused"))
    assert ranked == set(ORDER) - {*ONTO, "cuda-graphs"}


def test_what_ranks_cannot_share(tiny, h200):
    many = replace(h200, ranks=8)
    assert "one process" in find_rung("ddp").needs(tiny, h200, Plan())
    assert "cuda-graphs" in find_rung("ddp").needs(tiny, many, replace(Plan(), cuda_graphs=True))
    assert find_rung("ddp").needs(tiny, many, replace(Plan(), optimizer="muon")) is None
    for name in RANKS - {"ddp"}:
        assert "muon" in find_rung(name).needs(tiny, many, replace(Plan(), optimizer="muon"))
        assert "bf16" in find_rung(name).needs(tiny, many, replace(Plan(), autocast="fp16"))


def test_a_recipe_shares_a_step_one_way():
    assert with_parallel(("bf16",), None) == ("bf16", "ddp")
    assert with_parallel(("bf16", "fsdp"), None) == ("bf16", "fsdp")
    assert with_parallel(("fsdp", "bf16"), "fsdp-keep") == ("bf16", "fsdp-keep")
    with pytest.raises(UserError, match="unknown way to share a step 'zero'"):
        with_parallel((), "zero")


def test_what_applies_on_a_t4(tiny, t4):
    lacking = {"tf32", "bf16", "flash", "cudnn-attention", "adamw-bf16", "adamw-bf16-kahan", *LIBRARIES}
    assert applying(tiny, t4) == set(ORDER) - lacking - RANKS - NARROW


def test_what_applies_on_a_cpu(tiny, cpu):
    assert applying(tiny, cpu, Plan()) == set(ORDER) - RANKS - NARROW - {
        "tf32",
        "no-sync",
        "fp16",
        "cudnn-attention",
        "fused-loss",
        "adamw-bf16",  # without the rung bf16
        "adamw-bf16-kahan",
        "bf16-residual",
        "sigmoid-gelu",
        "fused-backward",
        *LIBRARIES,
        "budget-checkpointing",
        "max-autotune",
        "cuda-graphs",
        "expandable-segments",
    }


@every_rung
def test_a_refusal_is_a_readable_reason(rung, tiny, cpu, t4, h200):
    for hardware, plan in itertools.product((cpu, t4, h200), (Plan(), HALF)):
        reason = rung.needs(tiny, hardware, plan)
        assert reason is None or len(reason.split()) >= 3


def test_the_machines_own_reason_is_passed_on(tiny, cpu, t4):
    assert find_rung("tf32").needs(tiny, cpu, Plan()) == cpu.missing["tf32"]
    assert find_rung("bf16").needs(tiny, t4, Plan()) == "Tesla T4 has no bf16"


@pytest.mark.parametrize("name", ["flash", "cudnn-attention"])
def test_fused_attention_on_a_gpu_wants_16_bits(name, tiny, h200):
    assert "16-bit" in find_rung(name).needs(tiny, h200, Plan())
    assert find_rung(name).needs(tiny, h200, replace(Plan(), autocast="fp16")) is None


def test_a_narrow_stream_wants_bf16_and_compiled_code(tiny, h200):
    rung = find_rung("bf16-residual")
    assert rung.needs(tiny, h200, replace(Plan(), autocast="bf16", compile=True)) is None
    assert "bf16" in rung.needs(tiny, h200, replace(Plan(), autocast="fp16", compile=True))
    assert "compile" in rung.needs(tiny, h200, replace(Plan(), autocast="bf16"))


def test_a_fused_backward_wants_bf16_compiled_code_and_triton(tiny, h200, cpu):
    rung, plan = find_rung("fused-backward"), replace(Plan(), autocast="bf16", compile=True)
    assert rung.needs(tiny, h200, plan) is None
    assert "add bf16" in rung.needs(tiny, h200, replace(plan, autocast="fp16"))
    assert "add compile" in rung.needs(tiny, h200, replace(plan, compile=False))
    assert rung.needs(tiny, cpu, plan) == "a CPU has no triton"
    assert rung.needs(tiny, h200, replace(plan, parallel="ddp")) is None
    for cut in ({"parallel": "fsdp"}, {"parallel": "fsdp-keep"}, {"tensor_parallel": True}, {"pipeline": "1f1b"}):
        assert "a model that is cut" in rung.needs(tiny, h200, replace(plan, **cut))


@pytest.mark.parametrize(("way", "backward"), [("ddp", "fused"), ("fsdp", "autograd"), ("fsdp-keep", "autograd")])
def test_a_model_that_is_cut_has_no_fused_backward(way, backward):
    """A block of it reads a bias of the block before, which is not gathered then."""
    plan = plan_of(("bf16", "compile", "fused-backward", way))
    assert (plan.parallel, plan.backward) == (way, backward)


@pytest.mark.parametrize("name", ["tensor-parallel", "pipeline-parallel", "pipeline-gpipe"])
def test_layers_and_blocks_that_are_cut_have_no_fused_backward(name):
    assert plan_of(("bf16", "compile", "fused-backward", name)).backward == "autograd"


@pytest.mark.parametrize("loss", ["fused-loss", "chunked-loss"])
def test_ranks_that_share_the_logits_compute_their_own_loss(loss, tiny, h200):
    """A GPU's usual recipe has the fused one, and --tensor must not be refused for it."""
    rung, before = find_rung("tensor-parallel"), plan_of(("bf16", "compile", "fused-adamw", loss))
    assert rung.needs(tiny, replace(h200, ranks=2, count=2), before) is None
    assert rung.apply(before).loss == "full"


@pytest.mark.parametrize("name", ["max-autotune", "cuda-graphs"])
def test_ways_of_compiling_want_compiled_code_on_a_gpu(name, tiny, h200, cpu):
    rung = find_rung(name)
    assert rung.needs(tiny, h200, replace(Plan(), compile=True)) is None
    assert "add compile" in rung.needs(tiny, h200, Plan())
    assert "GPU" in rung.needs(tiny, cpu, replace(Plan(), compile=True))


def test_inductor_autotunes_matmuls_on_large_gpus_alone(tiny, h200):
    small = replace(h200, multiprocessors=40)
    assert "68" in find_rung("max-autotune").needs(tiny, small, replace(Plan(), compile=True))
    assert find_rung("cuda-graphs").needs(tiny, small, replace(Plan(), compile=True)) is None


def test_what_compiles_for_longer_says_so():
    assert {rung.name for rung in LADDER if rung.compile_factor > 1} == {"max-autotune"}


def test_what_needs_compile_goes_with_it(tiny, h200):
    needy = ("bf16-residual", "sigmoid-gelu", "fused-backward", "max-autotune", "cuda-graphs")
    others = ("tf32", "bf16", "cudnn-attention", "fused-adamw", "fused-loss")
    recipe = (*others[:2], "compile", *others[2:], *needy)
    assert without_rung(recipe, "compile", tiny, h200) == (others, ("compile", *needy))
    plan = plan_of(without_rung(recipe, "compile", tiny, h200)[0])
    assert plan == replace(plan_of(others), compile=False)
    assert without_rung(others, "compile", tiny, h200) == (others, ())


def test_what_did_not_apply_anyway_stays_when_another_rung_goes(tiny, cpu):
    assert without_rung(("tf32", "compile"), "compile", tiny, cpu) == (("tf32",), ("compile",))


def test_what_needs_an_undone_rung_is_undone_in_turn(tiny, h200):
    kept, undone = without_rung(("bf16", "compile", "flash", "bf16-residual"), "bf16", tiny, h200)
    assert (kept, undone) == (("compile",), ("bf16", "flash", "bf16-residual"))


def test_groups_are_what_takes_each_others_place():
    assert group_of(find_rung("cudnn-attention")) == group_of(find_rung("flash")) == "flash"
    assert group_of(find_rung("checkpointing")) == "selective-checkpointing"
    for rung in LADDER:
        first = find_rung(group_of(rung))
        assert first.instead_of is None
        assert LADDER.index(first) <= LADDER.index(rung)


@pytest.mark.parametrize("tied", [True, False])
def test_the_published_model_is_tied_or_not(tiny, tied):
    workload = replace(tiny, shape=replace(tiny.shape, tied=tied))
    assert published_rungs(workload) == (("tied-weights",) if tied else ())


def test_a_vocabulary_that_is_aligned_needs_no_padding(tiny, cpu):
    aligned = replace(tiny, shape=replace(tiny.shape, vocab=256))
    assert "256" in find_rung("padded-vocab").needs(aligned, cpu, Plan())


def test_one_core_has_none_to_spare_for_a_loader(tiny, cpu):
    assert "one core" in find_rung("loader-workers").needs(tiny, replace(cpu, cpu_cores=1), Plan())


@given(
    st.lists(st.sampled_from(ORDER), unique=True).flatmap(
        lambda names: st.tuples(st.just(names), st.permutations(names))
    )
)
@example((["bf16", "fp16"], ["fp16", "bf16"]))  # both write the same field
def test_the_order_of_a_recipe_does_not_matter(pair):
    names, shuffled = pair
    assert plan_of(names) == plan_of(shuffled)


def test_plan_of_the_whole_ladder():
    alternatives = ("fp16", "flash")
    plan = plan_of(rung.name for rung in LADDER if rung.name not in alternatives and not rung.when_named)
    assert plan == Plan(
        matmul_precision="high",
        attention="cudnn",
        tied=True,
        vocab_multiple=128,
        compile=True,
        autocast="bf16",
        optimizer="adamw-fused",
        read_loss_every=10,
        loader_workers=2,
        loss="fused",
        residual="bf16",
        gelu="sigmoid",
        backward="fused",
        packed_attention="flash4",
        tuned_matmuls=True,
        fused_matmuls=True,
        cuda_graphs=True,
    )
    assert plan_of(()) == plan_of(("baseline",)) == Plan()


def test_fp16_brings_its_scaler():
    assert plan_of(["fp16"]).loss_scaling
    assert not plan_of(["bf16"]).loss_scaling


@pytest.mark.parametrize(
    ("rungs", "precision"),
    [((), "fp32"), (("tf32",), "tf32"), (("tf32", "bf16"), "bf16"), (("fp16",), "fp16"), (("compile",), "fp32")],
)
def test_precision_is_the_coarsest_arithmetic(rungs, precision):
    assert plan_of(rungs).precision == precision


@pytest.mark.parametrize(("vocab", "rows"), [(50257, 50304), (257, 384), (256, 256), (1, 128)])
def test_padded_rows(vocab, rows):
    assert plan_of(["padded-vocab"]).vocab_rows(vocab) == rows
    assert Plan().vocab_rows(vocab) == vocab


def test_the_reference_keeps_only_what_changes_the_maths():
    plain = [rung.name for rung in LADDER if not rung.when_named]
    assert reference_plan(plain) == replace(Plan(), tied=True)
    assert reference_plan([*plain, "muon"]) == replace(Plan(), tied=True, optimizer="muon")
    assert reference_plan(["tf32", "bf16", "flash"]) == Plan()


@pytest.mark.parametrize("ask", [find_rung, lambda name: plan_of(["tf32", name]), lambda name: reference_plan([name])])
def test_an_unknown_rung_is_answered_with_the_known_ones(ask):
    with pytest.raises(UserError, match="unknown rung 'flsh'") as caught:
        ask("flsh")
    assert "did you mean 'flash'?" in caught.value.fix
    assert all(name in caught.value.fix for name in ORDER)


def test_shapes_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="3 heads do not divide d_model 32"):
        Shape(layers=1, heads=3, d_model=32, d_ff=64, vocab=257, sequence=8)
    with pytest.raises(UserError, match="layers is 0"):
        Shape(layers=0, heads=2, d_model=32, d_ff=64, vocab=257, sequence=8)


def test_packed_attention_wants_the_blocks_and_the_kernel_that_it_is_made_of(tiny, h200):
    ask = partial(find_rung("packed-attention").needs, tiny)
    whole = plan_of(("bf16", "compile", "cudnn-attention", "fused-backward"))
    assert ask(h200, whole) is None
    assert "fused-backward" in ask(h200, replace(whole, backward="autograd"))
    assert "cudnn-attention" in ask(h200, replace(whole, attention="flash"))
    assert "selective" in ask(h200, replace(whole, checkpointing="selective"))
    without = replace(h200, features=(), missing={"cudnn-frontend": "the package is not installed"})
    assert ask(without, whole) == "the package is not installed"


def test_the_backward_of_flash_attn_4_wants_a_forward_a_card_and_heads_that_it_takes(tiny, h200):
    ask = find_rung("flash4-backward").needs
    tiny = replace(tiny, shape=replace(tiny.shape, heads=1))  # of 32
    whole = plan_of(("bf16", "compile", "cudnn-attention", "fused-backward"))
    assert ask(tiny, h200, whole) is None
    assert ask(tiny, h200, replace(whole, autocast="fp16")) is None
    assert "16-bit" in ask(tiny, h200, replace(whole, autocast=None))
    assert "fused-backward" in ask(tiny, h200, replace(whole, backward="autograd"))
    assert "cudnn-attention" in ask(tiny, h200, replace(whole, attention="flash"))
    assert "selective" in ask(tiny, h200, replace(whole, checkpointing="selective"))
    for heads, width in ((8, 4), (2, 16), (1, 136)):
        odd = replace(tiny, shape=replace(tiny.shape, heads=heads, d_model=heads * width))
        assert f"these have {width}" in ask(odd, h200, whole)
    widest = replace(tiny, shape=replace(tiny.shape, heads=1, d_model=128))
    assert ask(widest, h200, whole) is None
    without = replace(h200, features=(), missing={"flash4": "the package is not installed"})
    assert ask(tiny, without, whole) == "the package is not installed"


def test_a_recipe_has_one_way_of_packed_attention():
    assert group_of(find_rung("flash4-backward")) == group_of(find_rung("packed-attention"))
    assert plan_of(("packed-attention",)).packed_attention == "cudnn"
    assert plan_of(("flash4-backward",)).packed_attention == "flash4"


def test_fused_matmuls_want_the_layers_and_the_blocks_that_they_are_made_of(tiny, h200):
    ask = partial(find_rung("fused-matmuls").needs, tiny)
    whole = plan_of(("bf16", "compile", "fused-backward", "tuned-matmuls"))
    assert ask(h200, whole) is None
    assert "tuned-matmuls" in ask(h200, replace(whole, tuned_matmuls=False))
    assert "fused-backward" in ask(h200, replace(whole, backward="autograd"))
    assert "compile" in ask(h200, replace(whole, compile=False))
    assert ask(h200, replace(whole, fp8_linears=True)) is None
    without = replace(h200, features=(), missing={"quack": "the package is not installed"})
    assert ask(without, whole) == "the package is not installed"


def test_fused_matmuls_name_the_width_that_no_kernel_takes(tiny, h200):
    odd = replace(tiny, shape=replace(tiny.decoder, d_ff=tiny.decoder.d_ff + 4))
    reason = find_rung("fused-matmuls").needs(
        odd, h200, plan_of(("bf16", "compile", "fused-backward", "tuned-matmuls"))
    )
    assert str(odd.decoder.d_ff) in reason
    assert "multiple of 8" in reason


@pytest.mark.parametrize("way", sorted(RANKS - {"ddp", "fsdp-whole"}))
def test_a_model_that_is_cut_leaves_products_and_attention_to_torch(way):
    plan = plan_of(("bf16", "compile", "cudnn-attention", "fused-backward", *sorted(LIBRARIES), way))
    assert not plan.tuned_matmuls
    assert not plan.fused_matmuls
    assert plan.packed_attention == "none"


def test_the_compiler_keeps_half_where_there_is_a_compiler(tiny, h200):
    rung = find_rung("budget-checkpointing")
    assert "compile" in rung.needs(tiny, h200, Plan())
    assert rung.needs(tiny, h200, Plan(compile=True)) is None
    assert plan_of(("compile", "budget-checkpointing")).activation_budget == 0.5
    assert group_of(rung) == group_of(find_rung("checkpointing"))
