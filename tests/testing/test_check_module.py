"""`check_module`: holds for what keeps the laws, and names the law that a module or a mode breaks."""

import itertools
import os
import re
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_overlap import MODES, Schedule
from lightning_overlap.data import SyntheticDataModule
from lightning_overlap.models import DLRM
from lightning_overlap.testing import ModuleReport, check_module

from ..sparse.callers import NoGrad
from ..support import cases
from ..support.cases import MIXED, TABLE_WISE, Model
from ..support.fits import mode_and_options
from ..support.pairs import in_turn
from ..support.ranks import Ranks


def check(case: cases.Case, pipeline: str | Schedule, module: type[Model] = Model, **options: Any) -> ModuleReport:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plan = cases.make_plan(case, Model(case), size)
    batches = [cases.make_batch(case, index, rank) for index in range(12)]
    mode, options = mode_and_options(pipeline, options)
    return check_module(lambda: module(case), batches, mode, sharding=plan, **options)


SHOWN = re.compile(r"(\d+)%\|.*?\| (\d+)/(\d+) \[[\d:]+<[\d:]+,")  # of a bar: steps, and the time that is left


def what_is_said(case: cases.Case, pipeline: str | Schedule, module: type[Model], **options: Any) -> str:
    try:
        return str(check(case, pipeline, module, **options))
    except AssertionError as err:
        return f"AssertionError: {err}"


_count = itertools.count()


class NeverTwiceAlike(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + next(_count) / 100)


class LeavesOneForward(Model):
    def on_train_end(self) -> None:
        if dist.get_rank() == 1:
            ebc: Any = self.ebc
            ebc.forward = print


class LeavesOneColumnOut(Model):
    """The second table gets a gradient of zeros."""

    def _pool(self, embeddings: Any, table: Any, feature: str) -> Any:
        pooled = super()._pool(embeddings, table, feature)
        return pooled.detach() if table.name == "t1" else pooled


class SendsInItsOwnOrder(Model):
    def on_fit_start(self) -> None:
        self.groups = [dist.new_group(), dist.new_group()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            groups = self.groups if dist.get_rank() == 0 else self.groups[::-1]
            for work in [dist.all_reduce(torch.zeros(1), group=group, async_op=True) for group in groups]:
                work.wait()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("pipeline", ["fused_sparse_dist", "base"])
def test_how_far_it_is(pipeline: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr: the fit, its share of all steps, and the time that is left; all steps are done in the end."""
    check(TABLE_WISE, pipeline, progress=True)
    said = capsys.readouterr().err
    states = [(float(share), int(done), int(num)) for share, done, num in SHOWN.findall(said)]
    num_steps = 12 * (3 + (pipeline != "base")) + 2 * 4
    assert states[-1] == (100, num_steps, num_steps)
    assert [share for share, *_ in states] == sorted(share for share, *_ in states)
    fits = ["first fit", "second fit", "base:", "unsharded"] + ["simulated streams"] * (pipeline != "base")
    assert all(fit in said for fit in fits)
    for progress in (None, False):  # None: where stderr is no terminal
        check(TABLE_WISE, pipeline, progress=progress)
        assert "check_module" not in capsys.readouterr().err


def test_the_dlrm_in_one_process() -> None:
    """As a user's test has it: no launcher, no process group. `test_modules_of_the_law_tests` has the other modes."""
    sizes = {f"cat_{index}": 50 for index in range(3)}
    data = SyntheticDataModule(num_tables=3, rows_per_table=50, num_dense=4, batch_size=16, num_batches=20)
    options: dict[str, Any] = {"fused_optimizer": "rowwise_adagrad", "table_learning_rate": 1.0}
    report = check_module(lambda: DLRM(sizes, num_dense=4, embedding_dim=8, **options), data)
    assert report.holds
    assert report.num_steps == 12
    assert set(report.early.values()) == {1.0}


def test_nothing_of_the_check_is_left() -> None:
    batches = [cases.make_batch(TABLE_WISE, index, 0) for index in range(4)]
    state, handler, environment = torch.get_rng_state(), signal.getsignal(signal.SIGTERM), dict(os.environ)
    check_module(lambda: Model(TABLE_WISE), batches, "semi_sync")
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), state)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert dict(os.environ) == environment


def test_the_report_says_what_was_split(two_ranks: Ranks) -> None:
    for text in two_ranks.run(what_is_said, TABLE_WISE, "split_backward", Model):
        assert re.search(r"weight gradients of .*top.0.* came after the backward", text.splitlines()[0])
    assert "the backward ran whole" in what_is_said(TABLE_WISE, "split_backward", Model).splitlines()[0]


KEPT = (MIXED, cases.SEQUENCE, cases.TWO_COLLECTIONS, cases.ROWWISE_ADAGRAD)


@pytest.mark.parametrize(("pipeline", "case"), in_turn(MODES, KEPT), ids=lambda value: getattr(value, "name", value))
def test_modules_of_the_law_tests(two_ranks: Ranks, case: cases.Case, pipeline: str) -> None:
    mode = MODES[pipeline]
    for report in two_ranks.run(check, case, pipeline):
        assert report.holds
        assert report.num_ranks == 2
        assert all(share == float(mode.has_sparse_stages) for share in report.early.values())


@pytest.mark.parametrize(
    ("pipeline", "options"),
    [
        ("fused_sparse_dist", {"quantized_comms": "fp16"}),
        ("semi_sync", {"defer_update": True}),
        ("async_lookup", {"staleness": 4}),
        ("async_lookup", {"staleness": 4, "start_batch": 4, "end_batch": 8}),
    ],
    ids=str,
)
def test_options_of_a_mode_and_of_the_strategy(two_ranks: Ranks, pipeline: str, options: dict[str, Any]) -> None:
    assert all(report.holds for report in two_ranks.run(check, MIXED, pipeline, **options))


def test_a_read_of_the_loss_is_reported_or_breaks_the_law() -> None:
    report = check(TABLE_WISE, "fused_sparse_dist", cases.ReadsItsLoss)
    [(place, num)] = report.host_syncs.items()
    assert "training_step, cases.py" in place
    assert num == 1
    with pytest.raises(AssertionError, match=r"law 9: .*training_step, cases.py:\d+ \(1 a step\)"):
        check(TABLE_WISE, "fused_sparse_dist", cases.ReadsItsLoss, max_host_syncs=0)
    assert not check(TABLE_WISE, "fused_sparse_dist", max_host_syncs=0).host_syncs


def test_a_module_in_its_own_forward_is_named_with_the_reason() -> None:
    reason = "its input (KeyedJaggedTensor) is made inside training_step"
    with pytest.raises(AssertionError, match="served from early lookups: 'ebc' ran in its own forward: ") as caught:
        check(TABLE_WISE, "semi_sync", cases.MakesInput)
    assert reason in str(caught.value)
    report = check(TABLE_WISE, "semi_sync", cases.MakesInput, must_overlap=False)
    assert reason in report.plain["ebc"]
    assert report.early == {"ebc": 0.0}


class FollowsItsValidation(Model):
    """What the last validation has answered is part of each loss."""

    validated = torch.zeros(())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated = self(batch).detach()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.validated)


def test_a_validation_of_the_reference_sees_all_updates() -> None:
    options = {"limit_val_batches": 1, "val_check_interval": 2}
    assert check(TABLE_WISE, "semi_sync", FollowsItsValidation, trainer_options=options).holds


def test_a_module_that_trains_otherwise_each_time() -> None:
    with pytest.raises(AssertionError, match="law 2: every run alike: at step 0: the loss is"):
        check(TABLE_WISE, "fused_sparse_dist", NeverTwiceAlike)


def test_the_report_says_which_tables_were_trained(two_ranks: Ranks) -> None:
    for report in two_ranks.run(check, MIXED, "semi_sync"):
        assert report.trained == {f"ebc.embedding_bags.{name}.weight": True for name in ("d0", "d1", "t0", "t1")}
    for report in two_ranks.run(check, TABLE_WISE, "fused_sparse_dist", LeavesOneColumnOut):
        assert report.trained == {f"ebc.embedding_bags.t{at}.weight": at != 1 for at in range(3)}
        assert "; no row changed of ebc.embedding_bags.t1.weight" in str(report)


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist", "semi_sync"])
def test_tables_that_no_gradient_reaches_break_a_law(two_ranks: Ranks, pipeline: str) -> None:
    problem = "no gradient reaches tables of 'ebc' (t0, t1, t2): training_step calls the module without gradients"
    law = "law 11: a gradient reaches the tables that are to be trained"
    for text in two_ranks.run(what_is_said, TABLE_WISE, pipeline, NoGrad):
        assert text.startswith(f"AssertionError: {law}: rank 0: {problem}")
    with pytest.raises(AssertionError, match=law):
        check(TABLE_WISE, pipeline, NoGrad)


def test_ranks_that_send_in_another_order(two_ranks: Ranks) -> None:
    for text in two_ranks.run(what_is_said, TABLE_WISE, "fused_sparse_dist", SendsInItsOwnOrder):
        assert text.startswith("AssertionError: law 5: the same collectives in the same order on all ranks: ")
        assert "allreduce_ of group" in text
        assert "at batch 3" in text


def test_what_one_rank_finds_all_raise(two_ranks: Ranks) -> None:
    for text in two_ranks.run(what_is_said, TABLE_WISE, "semi_sync", LeavesOneForward):
        assert text.startswith("AssertionError: nothing left patched or in flight: rank 1: the forward of 'ebc'")


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"pass its class, or `lambda: MyModule\(...\)`"):
        check_module(Model(TABLE_WISE), [cases.make_batch(TABLE_WISE, 0, 0)])
    with pytest.raises(ValueError, match="needs two batches or more, got 1"):
        check_module(lambda: Model(TABLE_WISE), [cases.make_batch(TABLE_WISE, 0, 0)])
