"""Fits that read weights of tables as if this rank had them whole, and write them. Functions that ranks run."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor, nn
from torch.nn.utils import get_total_norm, parameters_to_vector
from torch.utils.data import DataLoader

from lightning_overlap.tables import local_part, num_fused_writes, parts

from ..plugin.table_reads import Fit, Net, Table, make_batch, make_fit

IDS = torch.zeros(2, dtype=torch.int64)
WHOLE = ("data_parallel", "replicated")


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * weight


def _query(weight: Any) -> Tensor:
    return torch.ones(2, weight.shape[-1], dtype=weight.dtype)


READINGS: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda weight: _query(weight) @ weight,
    "scores": lambda weight: _query(weight) @ weight.T,
    "linear": lambda weight: F.linear(_query(weight), weight),
    "einsum": lambda weight: torch.einsum("bd,nd->bn", _query(weight), weight),
    "index": lambda weight: weight[0],
    "slice": lambda weight: weight[:],
    "index_select": lambda weight: weight.index_select(0, IDS),
    "embedding": lambda weight: F.embedding(IDS, weight),
    "embedding_bag": lambda weight: F.embedding_bag(IDS, weight, IDS[:1]),
    "norm": lambda weight: weight.norm(),
    "vector_norm": lambda weight: torch.linalg.vector_norm(weight),
    "total_norm": lambda weight: get_total_norm([weight]),
    "sum": lambda weight: weight.sum(),
    "mean": lambda weight: torch.mean(weight),
    "topk": lambda weight: weight.topk(1),
    "argmax": lambda weight: torch.argmax(input=weight),
    "isfinite": lambda weight: torch.isfinite(weight).all(),
    "multiply": lambda weight: weight * 2,
    "compare": lambda weight: weight == 0,
    "cat": lambda weight: torch.cat([weight, weight]),
    "into": lambda weight: torch.zeros(weight.shape).add_(weight),
    "out": lambda weight: torch.add(torch.zeros(weight.shape), 1, out=weight),
    "vector": lambda weight: parameters_to_vector([weight]),
    "function": lambda weight: _Squares.apply(weight),
    "tolist": lambda weight: weight.tolist(),
    "numpy": lambda weight: weight.numpy(),
    "asarray": lambda weight: np.asarray(weight),
    "iterate": lambda weight: next(iter(weight)),
    "length": lambda weight: len(weight),
    "row": lambda weight: weight.__setitem__(0, 0.0),
    "rows": lambda weight: weight.index_fill_(0, IDS, 0.0),
}
OF_TENSORS: dict[str, Callable[[Any], Any]] = {  # a ShardedTensor can do these
    "save": lambda weight: torch.save(weight, io.BytesIO()),
    "xavier": lambda weight: nn.init.xavier_uniform_(weight) if weight.dim() == 2 else weight[0],
    "kaiming": lambda weight: nn.init.kaiming_uniform_(weight),
}
CHANGING = ("out", "row", "rows", "xavier", "kaiming")
SOURCES: dict[str, Callable[[nn.Module, str], Any]] = {
    "parameter": lambda module, key: module.get_parameter(key),
    "named_parameters": lambda module, key: dict(module.named_parameters())[key],
    "data": lambda module, key: module.get_parameter(key).data,
    "data_of_data": lambda module, key: module.get_parameter(key).data.data,
    "detach": lambda module, key: module.get_parameter(key).detach(),
    "clone": lambda module, key: module.get_parameter(key).detach().clone(),
    "to": lambda module, key: module.get_parameter(key).to("cpu", torch.float64),
    "copy": lambda module, key: copy.deepcopy(module.get_parameter(key)),
    "parameter_of": lambda module, key: nn.Parameter(module.get_parameter(key).data),
    "state_dict": lambda module, key: module.state_dict()[key],
}
GRAD_MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
HOOKS = (
    *("on_train_start", "on_train_batch_start", "on_before_backward", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_predict_batch_end", "on_fit_end"),
)
STEPS = ("training_step", "validation_step", "predict_step")


def key_of(fit: Fit, at: int) -> str:
    return f"ebc.{'embeddings' if fit.sequence else 'embedding_bags'}.t{at}.weight"


class Reader:
    """Reads every table in each place of a run, by each operator, and notes what was not as it has to be."""

    def __init__(self, fit: Fit, num_ranks: int) -> None:
        self.fit, self.num_ranks, self.wrong, self.seen = fit, num_ranks, list[str](), set[str]()

    def read(self, where: str, trainer: Any, module: nn.Module) -> None:
        if where in self.seen:
            return
        self.seen.add(where)
        mode = list(GRAD_MODES)[len(self.seen) % len(GRAD_MODES)]
        for at, table in enumerate(self.fit.tables):
            # One rank has both halves of a column-wise table, one below the other.
            is_whole = table.sharding in WHOLE or (self.num_ranks == 1 and table.sharding != "column_wise")
            whole = trainer.strategy.table(f"t{at}") if is_whole else None
            for source, reading, read in _ways(at + len(self.seen)):
                place = f"{reading} of {source} of t{at} ({table.sharding}) in {where} with {mode}"
                if whole is None:
                    expected = f"{key_of(self.fit, at)}: ", f"{table.sharding}), and rank ", f"strategy.table('t{at}')"
                    with GRAD_MODES[mode]():
                        self._expect_error(place, expected, lambda: read(SOURCES[source](module, key_of(self.fit, at))))  # noqa: B023
                elif reading not in CHANGING and source != "state_dict":
                    with torch.no_grad():
                        self._expect_equal(place, read, SOURCES[source](module, key_of(self.fit, at)), whole)

    def _expect_error(self, place: str, expected: tuple[str, ...], read: Callable[[], Any]) -> None:
        try:
            read()
        except RuntimeError as err:
            if not all(text in str(err) for text in expected):
                self.wrong.append(f"{place}: {err}")
        else:
            self.wrong.append(f"{place}: no error")

    def _expect_equal(self, place: str, read: Callable[[Any], Any], weight: Any, whole: Tensor) -> None:
        try:
            expected = read(whole.to(weight.dtype))
        except RuntimeError:
            return  # as torch's, of shapes that do not fit
        if isinstance(expected, Tensor) and not torch.equal(read(weight), expected):
            self.wrong.append(f"{place}: not as unsharded")


def _ways(turn: int) -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
    """Yield each reading with a source; after as many turns as there are sources each reading met each source."""
    for number, (reading, read) in enumerate({**READINGS, **OF_TENSORS}.items()):
        source = list(SOURCES)[(number + turn) % len(SOURCES)]
        if source != "state_dict" or reading in READINGS:
            yield source, reading, read


class ReadingNet(Net):
    reader: Reader

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.ebc(batch)

    def predict_dataloader(self) -> DataLoader[Any]:
        batches = [make_batch(self.fit, step, self.trainer.global_rank) for step in range(2)]
        return DataLoader(batches, batch_size=None)


def _stepping(step: str, own: Any) -> Any:
    def read(self: ReadingNet, batch: Any, batch_idx: int) -> Any:
        self.reader.read(step, self.trainer, self)
        return own(self, batch, batch_idx)

    return read


for _step in STEPS:
    setattr(ReadingNet, _step, _stepping(_step, getattr(ReadingNet, _step)))


def _hooked(hook: str) -> Any:
    return lambda self, trainer, module, *_, **__: self.reader.read(hook, trainer, module)


class ReadsInHooks(Callback):
    def __init__(self, reader: Reader) -> None:
        self.reader = reader


for _hook in HOOKS:
    setattr(ReadsInHooks, _hook, _hooked(_hook))


def wrong_reads(fit: Fit, num_ranks: int) -> tuple[list[str], set[str]]:
    """Read in all hooks of a fit and a prediction; return what was wrong, and where it was read."""
    reader = Reader(fit, num_ranks)
    trainer, net = make_fit(fit, ReadsInHooks(reader))
    net.__class__, net.reader = ReadingNet, reader  # type: ignore[assignment]
    trainer.fit(net)
    trainer.predict(net, return_predictions=False)
    return reader.wrong, reader.seen


ROW = torch.arange(8) / 8
WRITES: dict[str, Callable[[Any, Any], Any]] = {  # a table and another one that is sharded alike
    "mul_": lambda weight, other: weight.mul_(0.5),
    "clamp_": lambda weight, other: weight.clamp_(-0.1, max=0.1),
    "add_": lambda weight, other: weight.add_(1, alpha=0.25),
    "fill_": lambda weight, other: weight.fill_(3),
    "zero_": lambda weight, other: weight.data.zero_(),
    "data": lambda weight, other: weight.data.add_(1),
    "detach": lambda weight, other: weight.data.detach().mul_(2),
    "constant_": lambda weight, other: nn.init.constant_(weight, 0.5),
    "decay": lambda weight, other: weight.mul_(0.9).add_(other, alpha=0.1),
    "copy_": lambda weight, other: weight.copy_(other.detach()),
    "clone": lambda weight, other: weight.sub_(other.data.clone()),
    "itself": lambda weight, other: weight.add_(weight),
    "augmented": lambda weight, other: weight.data.__imul__(1.5),
    "lerp_": lambda weight, other: weight.lerp_(other, 0.25),
    "masked": lambda weight, other: weight.masked_fill_(torch.zeros_like(weight, dtype=torch.bool), 1.0),
    "average": lambda weight, other: weight.copy_(torch.zeros_like(weight).mul_(0.5).add_(other, alpha=0.5)),
    "number": lambda weight, other: weight.div_(torch.tensor(2.0)),
}


def wrong_writes(fit: Fit) -> list[str]:
    """Write the first half of a fit's tables in place, by the second one; return what differs from whole tables."""
    trainer, net = make_fit(fit)
    trainer.fit(net)
    wrong = []
    for name, write in WRITES.items():
        for at in range(len(fit.tables) // 2):
            pair = at, at + len(fit.tables) // 2
            weight, other = (net.get_parameter(key_of(fit, number)) for number in pair)
            expected, of_other = (trainer.strategy.table(f"t{number}") for number in pair)
            before = num_fused_writes(net.ebc)
            with torch.no_grad():
                write(weight, other)
                write(expected, of_other)
            if not torch.equal(trainer.strategy.table(f"t{at}"), expected):
                wrong.append(f"{name} of {fit.tables[at]}")
            if weight.numel() and num_fused_writes(net.ebc) == before:
                wrong.append(f"{name} of {fit.tables[at]} was not noticed")
    return wrong


class _Decays(torch.optim.Optimizer):
    """A user's, which reads weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            weight.sub_(weight * 0.25 + weight.grad)


OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, weight_decay=0.1),
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1, weight_decay=0.1, momentum=0.5, foreach=True),
    "own": _Decays,
}


def wrong_of_optimizers(fit: Fit) -> list[str]:
    """Let optimizers of the dense part have tables; return what differs from whole tables."""
    trainer, net = make_fit(fit)
    trainer.fit(net)
    wrong = []
    for name, make in OPTIMIZERS.items():
        weights = [net.get_parameter(key_of(fit, at)) for at in range(len(fit.tables))]
        whole = [trainer.strategy.table(f"t{at}").requires_grad_() for at in range(len(fit.tables))]
        for weight in (*weights, *whole):
            weight.grad = torch.full_like(local_part(weight), 0.5)
        for parameters in (weights, whole):
            make(parameters).step()
        for at, expected in enumerate(whole):
            if not torch.equal(trainer.strategy.table(f"t{at}"), expected):
                wrong.append(f"{name} of {fit.tables[at]}")
        for weight in weights:
            weight.grad = None
    return wrong


def errors_of_operands() -> dict[str, str]:
    """Write parts by operands that do not fit the parts of all ranks; return the errors."""
    fit = Fit((Table("row_wise"), Table("column_wise"), Table("table_wise"), Table("row_wise", num_rows=9)))
    trainer, net = make_fit(fit)
    trainer.fit(net)
    rows, columns, one, others = (net.get_parameter(key_of(fit, at)) for at in range(4))
    whole = trainer.strategy.table("t2") + 1
    with torch.no_grad():
        one.copy_(whole)  # fits the only part there is; other ranks have nothing to write
        assert torch.equal(trainer.strategy.table("t2"), whole)
        rows.mul_(ROW)
        one.mul_(ROW)
        assert torch.equal(trainer.strategy.table("t2"), whole * ROW)
    writes: dict[str, Callable[[], Any]] = {
        "whole": lambda: rows.copy_(whole),
        "columns": lambda: columns.mul_(ROW),
        "another": lambda: rows.add_(columns),
        "longer": lambda: rows.copy_(others.data),
        "plain": lambda: torch.zeros(7, 8).copy_(one),
    }
    return {name: _error(write) for name, write in writes.items()}


def _error(call: Callable[[], Any]) -> str:
    try:
        with torch.no_grad():
            call()
    except RuntimeError as err:
        return str(err)
    return "no error"


def what_goes_on(fit: Fit) -> dict[str, Any]:
    """Do what reads no element, or all of the module; return what it gave."""
    trainer, net = make_fit(fit)
    trainer.fit(net)
    found: dict[str, Any] = {"text": [f"{net.get_parameter(key_of(fit, at))}" for at in range(len(fit.tables))]}
    found["print"] = str(dict(net.named_parameters()))
    found["summary"] = str(ModelSummary(net, max_depth=3))
    before = [trainer.strategy.table(f"t{at}") for at in range(len(fit.tables))]
    state = net.state_dict()
    torch.save(state, io.BytesIO())
    net.to("cpu").float()
    kept = copy.deepcopy(state)
    for weight in net.parameters():
        weight.data.zero_()
    net.load_state_dict(kept)
    after = [trainer.strategy.table(f"t{at}") for at in range(len(fit.tables))]
    found["loaded"] = all(map(torch.equal, before, after))
    found["compiled"] = [_error(lambda: _compiled_sum(net.get_parameter(key_of(fit, 0))))]
    return found


def _compiled_sum(weight: Tensor) -> Tensor:
    return torch.compile(lambda given: torch.ones(1) * given.sum(), backend="eager")(weight)  # type: ignore[no-any-return]


def calls_in_steps(fit: Fit) -> int:
    """Return how often steps of a fit ask the weights of tables anything."""
    calls: list[Any] = []
    own = parts._name_of

    def count(func: Any) -> str:
        calls.append(func)
        return own(func)

    class Counts(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                calls.clear()

    trainer, net = make_fit(fit, Counts())
    trainer.limit_val_batches = 0
    trainer.num_sanity_val_steps = 0
    ends: list[int] = []
    net.on_train_epoch_end = lambda: ends.append(len(calls))  # type: ignore[method-assign]
    with mock.patch.object(parts, "_name_of", count):
        trainer.fit(net)
    return ends[0]


def _sum_of_plain(part: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return part.sum()


PAST_OPERATORS: dict[str, Callable[[Tensor], Any]] = {  # what asks no `__torch_function__`, or none of the part's
    "tensor": lambda part: torch.tensor(part),
    "legacy": lambda part: torch.Tensor(part),
    "vmap": lambda part: torch.vmap(lambda row: row.sum())(part),
    "set_": lambda part: torch.empty(0).set_(part),
    "as_subclass": lambda part: part.as_subclass(Tensor).sum(),
    "disabled": _sum_of_plain,
    "all_reduce": lambda part: dist.all_reduce(part),
    "another_data": lambda part: setattr(nn.Parameter(torch.zeros(part.shape)), "data", part),
    "storage": lambda part: part.untyped_storage(),
    "compiled": torch.compile(lambda part: part.sum(), backend="eager"),
}


def reads_past_operators(fit: Fit) -> list[str]:
    """Return what reads `weight.data` without an error."""
    found: list[str] = []

    class Reads(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            for at in range(len(fit.tables)):
                weight = module.get_parameter(key_of(fit, at))
                for source, part in (("data", weight.data), ("detach", weight.detach()), ("copy", weight.clone())):
                    for name, read in PAST_OPERATORS.items():
                        try:
                            read(part)
                        except (RuntimeError, TypeError, NotImplementedError):
                            continue
                        found.append(f"{name} of {source} of t{at}")

    trainer, net = make_fit(fit, Reads())
    trainer.fit(net)
    return found


def exchanged_memory(fit: Fit) -> list[str]:
    """Return the errors of `weight.data = ...`, by table, and for tables that are whole on each rank."""
    errors: list[str] = []

    class Writes(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            for at in range(len(fit.tables)):
                weight = module.get_parameter(key_of(fit, at))
                try:
                    weight.data = torch.ones(weight.shape)
                except RuntimeError as err:
                    errors.append(str(err))
            for source in ("data", "detach"):
                assert SOURCES[source](module, key_of(fit, 0)).layout is torch.strided
            module.to("cpu")

    trainer, net = make_fit(fit, Writes())
    trainer.fit(net)
    return errors
