"""What a user leaves out of a fused optimizer is what the named class takes; what FBGEMM cannot be told is refused."""

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec.optim
from fbgemm_gpu import split_embedding_codegen_lookup_invokers as invokers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.distributed.utils import merge_fused_params

from lightning_overlap.tables.fused_arguments import (
    READ_BY_ALL,
    READ_BY_KERNEL,
    kernel_arguments,
    keywords_of,
    kind_of,
    refused_keywords,
)
from lightning_overlap.tables.optimizer_checks import check_fused_optimizer

from ..support.pairs import in_turn
from ..support.ranks import Ranks
from . import fused_defaults

SIGNED = torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torchrec.optim.RowWiseAdagrad
PLACEHOLDERS = tuple(
    getattr(torchrec.optim, name)
    for name in ("SGD", "Adagrad", "Adam", "LAMB", "LarsSGD", "PartialRowWiseAdam", "PartialRowWiseLAMB")
)
NUMBERS = st.sampled_from([1e-10, 1e-3, 0.5])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "lr": NUMBERS,
    "betas": st.tuples(st.sampled_from([0.5, 0.9]), st.sampled_from([0.9, 0.999])),
    **dict.fromkeys(("eps", "momentum", "dampening", "weight_decay", "lr_decay", "initial_accumulator_value"), NUMBERS),
}
FLAGS = (
    "nesterov",
    "maximize",
    "foreach",
    "differentiable",
    "fused",
    "amsgrad",
    "capturable",
    "decoupled_weight_decay",
)


def test_every_class_that_torchrec_can_fuse_is_known() -> None:
    optimizers = [one for one in vars(torch.optim).values() if isinstance(one, type)]
    classes = {*optimizers, *(one for one in vars(torchrec.optim).values() if isinstance(one, type))}
    assert {one for one in classes if kind_of(one) is not None} == {*SIGNED, *PLACEHOLDERS}
    assert {kind_of(one) for one in (*SIGNED, *PLACEHOLDERS)} == READ_BY_KERNEL.keys()
    for one in PLACEHOLDERS:
        assert keywords_of(one) == {}
    known = {*VALUES, *FLAGS}
    assert [name for one in SIGNED for name in keywords_of(one) if name not in known] == []


def reached(optimizer: type, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What reaches FBGEMM's constructor, by its names and with its defaults."""
    renamed = merge_fused_params(None, kernel_arguments(optimizer, kwargs))
    bound = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).bind_partial(**renamed)
    bound.apply_defaults()
    return bound.arguments


@given(st.data())
def test_the_keywords_that_reach_the_kernel_are_the_defaults_of_the_class_itself(data: st.DataObject) -> None:
    """The oracle: what an optimizer of the class, made with the same keywords, has in its groups."""
    optimizer: Any = data.draw(st.sampled_from(SIGNED))
    names = data.draw(st.sets(st.sampled_from(sorted(keywords_of(optimizer)))))
    zero = st.sampled_from([0, 0.0, False, None])
    kwargs: dict[str, Any] = {}
    for name in sorted(names):
        drawn = VALUES.get(name, st.just(True))
        kwargs[name] = data.draw(
            drawn if name in ("lr", "betas") else drawn | st.just(0.0) if name == "eps" else drawn | zero
        )
    try:
        made = optimizer([nn.Parameter(torch.zeros(2, 2))], **kwargs)
    except (TypeError, ValueError, RuntimeError):  # the class's own error: None for a number, nesterov without momentum
        return
    theirs = dict(made.defaults)
    told = {"lr": theirs.pop("lr")}
    if optimizer is not torch.optim.SGD:
        told["eps"] = theirs.pop("eps")
    if optimizer is torch.optim.Adam:
        told["betas"] = theirs.pop("betas")
    cannot = {name for name, value in theirs.items() if value and name in kwargs}
    for on_cpu in {False, kind_of(optimizer) in fused_defaults.ON_CPU}:
        assert refused_keywords(optimizer, kwargs, on_cpu=on_cpu).keys() == cannot
    if cannot:
        return
    arguments = reached(optimizer, kwargs)
    assert arguments["learning_rate"] == told["lr"]
    assert "eps" not in told or arguments["eps"] == told["eps"]
    assert "betas" not in told or (arguments["beta1"], arguments["beta2"]) == told["betas"]
    assert arguments["weight_decay"] == 0


@pytest.mark.parametrize("optimizer", PLACEHOLDERS)
def test_classes_that_stand_for_a_kernel_take_its_defaults_and_what_it_reads(optimizer: Any) -> None:
    plain = reached(optimizer, {})
    assert (plain["learning_rate"], plain["eps"], plain["momentum"]) == (0.01, 1e-8, 0.9)  # as TorchRec trains
    kind = kind_of(optimizer)
    assert kind is not None
    for name in {name for names in READ_BY_KERNEL.values() for name in names}:
        assert (name in refused_keywords(optimizer, {name: 0.5}, on_cpu=False)) == (name not in READ_BY_KERNEL[kind])
        assert refused_keywords(optimizer, {name: 0}, on_cpu=False) == {}
    assert reached(optimizer, {"lr": torch.tensor(0.5)})["learning_rate"] == 0.5
    assert refused_keywords(optimizer, {"lr": 0.1, "learning_rate": 0.2}, on_cpu=True).keys() == {"learning_rate"}
    assert refused_keywords(optimizer, {"max_gradient": 0.1}, on_cpu=True).keys() == {"max_gradient"}
    assert refused_keywords(optimizer, {"max_gradient": 0.1, "gradient_clipping": True}, on_cpu=True) == {}
    assert refused_keywords(optimizer, {"optimizer": kind}, on_cpu=True) == {}
    assert refused_keywords(optimizer, {"optimizer": EmbOptimType.NONE}, on_cpu=True).keys() == {"optimizer"}


def test_each_kernel_reads_the_arguments_that_are_listed() -> None:
    """By the functions that hand them to FBGEMM's operators."""
    files = {
        EmbOptimType.EXACT_SGD: "sgd",
        EmbOptimType.EXACT_ADAGRAD: "adagrad",
        EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
        EmbOptimType.ADAM: "adam",
        EmbOptimType.PARTIAL_ROWWISE_ADAM: "partial_rowwise_adam",
        EmbOptimType.LAMB: "lamb",
        EmbOptimType.PARTIAL_ROWWISE_LAMB: "partial_rowwise_lamb",
        EmbOptimType.LARS_SGD: "lars_sgd",
    }
    in_configs = {"counter_based_regularization", "cowclip_regularization", "global_weight_decay"}
    in_configs |= {"extra_optimizer_config", "optimizer_state_dtypes"}
    for kind, name in files.items():
        source = (Path(invokers.__file__).parent / f"lookup_{name}.py").read_text()
        read = set(re.findall(r"optimizer_args\.(\w+)", source)) - {"use_rowwise_bias_correction"}
        assert read - {*READ_BY_ALL} == {*READ_BY_KERNEL[kind]} - in_configs


@pytest.mark.parametrize("kind", fused_defaults.ON_CPU)
def test_what_is_refused_on_a_cpu_changes_no_update_there_and_what_is_taken_does(kind: EmbOptimType) -> None:
    [optimizer] = [one for one in (*PLACEHOLDERS, SIGNED[-1]) if kind_of(one) is kind]
    plain = fused_defaults.trained(kind)
    for name, kwargs in fused_defaults.UPDATES.items():
        changes = not torch.equal(fused_defaults.trained(kind, **kwargs), plain)
        assert changes == (name not in refused_keywords(optimizer, kwargs, on_cpu=True)), (kind, name)


def test_a_left_out_rate_without_a_default_is_the_error_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Needy(torch.optim.SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr)

    with pytest.raises(TypeError, match=r"Needy does not take {}: .*missing 1 required positional argument: 'lr'"):
        check_fused_optimizer((Needy, {}))
    assert check_fused_optimizer(functools.partial(torch.optim.SGD)) == (torch.optim.SGD, {"lr": 1e-3})


@pytest.mark.parametrize(
    ("optimizer", "kwargs", "way"),
    [
        (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, "torchrec.optim.Adam"),
        (torchrec.optim.RowWiseAdagrad, {"weight_decay": 0.1}, "weight_decay_mode=WeightDecayMode.L2"),
    ],
)
def test_a_refusal_says_what_to_do(optimizer: Any, kwargs: dict[str, Any], way: str) -> None:
    assert way in refused_keywords(optimizer, kwargs, on_cpu=False)["weight_decay"]


def test_the_table_of_the_docs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/optimizers.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| `torch(rec)?\.optim\.", line)]
    assert rows == [fused_defaults.documented(one) for one in (*SIGNED, *PLACEHOLDERS)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tables_train_as_the_unsharded_module_by_the_class_itself(get_ranks: Any, num_ranks: int) -> None:
    """Left out and passed keywords, by the strategy and by the module, under every type; gradients of about 1e-9."""
    ranks: Ranks = get_ranks(num_ranks)
    cases = in_turn(fused_defaults.KEYWORDS, fused_defaults.PLACES)
    for found in ranks.run(fused_defaults.compare, cases, timeout_s=240):
        assert found == {case: [] for case in found}
        assert len(found) == len(cases)
