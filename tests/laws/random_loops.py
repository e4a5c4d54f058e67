"""Random fits trained: by plain DistributedModelParallel in a loop by hand, and under the strategy. Ranks run this."""

import dataclasses
import datetime
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.tuning import Auto

from ..support.fits import make_trainer, mode_and_options
from ..support.reference import Result, collect
from .random_fits import ORDERED, Fit, Part
from .random_models import Data, Net, make_batch, make_plan, opened, order_of, seed_dropout
from .random_unsharded import differences_from_unsharded

COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=20)
NOT_DRAWN = "plain training fails: "
EVERY_SECOND_BATCH = Auto(warm_up=1, settle=1, block=1, rounds=1)  # switches to another mode after so many batches


class _Loop:
    """Training by hand. With a staleness, each batch is looked up so many updates early.

    `means`: for each part the answers that are divided by their numbers of ids, and the feature of each.
    """

    def __init__(self, fit: Fit, staleness: int, means: Mapping[str, Mapping[str, str]]) -> None:
        self.fit, self.staleness, self.means = fit, staleness, means
        self.module = Net(fit)
        weights = {part.name: getattr(self.module, part.name).state_dict() for part in fit.parts}
        self.dmp = DistributedModelParallel(
            self.module,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=make_plan(fit, self.module),
            init_data_parallel=False,
        )
        for name, state in weights.items():
            getattr(self.module, name).load_state_dict(state)
        self.optimizer = self.module.configure_optimizers()
        self.embeddings: dict[tuple[int, str], Any] = {}
        self.module.look_up = self._look_up
        self.num_steps = 0

    def train(self) -> Result:
        seed_dropout(self.fit, dist.get_rank())
        for epoch in range(self.fit.epochs):
            self.embeddings.clear()
            self.order = order_of(self.fit, epoch)
            for index in range(self.fit.num_batches):
                if self.num_steps != self.fit.max_steps:
                    self._step(index)
        return collect(self.module, self.optimizer, self.module.losses)  # type: ignore[arg-type]

    def _look_up(self, part: Part, kjt: KeyedJaggedTensor, batch: int) -> Any:
        """Wait where the module is called: under the grad mode of the call, not of the first use."""
        answer = self.embeddings.pop((batch, part.name), None)
        if answer is None:
            answer = getattr(self.module, part.name)(kjt).wait()
        if part.sequence:
            return answer
        columns, lengths = answer.to_dict(), dict(zip(kjt.keys(), kjt.lengths().view(len(kjt.keys()), -1), strict=True))
        for name, feature in self.means[part.name].items():
            columns[name] = columns[name] / lengths[feature].clamp(min=1).float().unsqueeze(1)
        return columns

    def _look_ahead(self, index: int) -> None:
        for ahead in range(index, min(index + self.staleness + 1, self.fit.num_batches)):
            inside = opened(self.fit, make_batch(self.fit, self.order[ahead], dist.get_rank()))
            for part in self.fit.parts:
                if (ahead, part.name) not in self.embeddings:
                    with torch.set_grad_enabled(part.use != "no_grad"):
                        answer = getattr(self.module, part.name)(inside.sparse[part.kjt])
                        self.embeddings[ahead, part.name] = answer.wait()

    def _step(self, index: int) -> None:
        fit = self.fit
        last = (index + 1) % fit.accumulate == 0 or index + 1 == fit.num_batches
        if self.staleness:
            self._look_ahead(index)
        if fit.manual or index % fit.accumulate == 0:
            self.optimizer.zero_grad()
        loss = self.module.training_step(make_batch(fit, self.order[index], dist.get_rank()), index)
        if loss is not None:
            (loss / fit.accumulate).backward()
            if last:
                self._share_gradients()
        if last and not self.module.skips(index):
            if fit.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], fit.clip)
            self.optimizer.step()
            self.num_steps += 1
        if fit.validate_every and (index + 1) % fit.validate_every == 0:
            self._validate()

    def _share_gradients(self) -> None:
        for name, weight in self.module.named_parameters():
            if name.startswith(("bottom.", "top.")):
                assert weight.grad is not None
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()

    def _validate(self) -> None:
        self.module.eval()
        waiting, self.embeddings = self.embeddings, {}
        with torch.no_grad():
            for index in range(2):
                self.module.validation_step(make_batch(self.fit, 1000 + index, dist.get_rank()), index)
        self.embeddings = waiting
        self.module.train()


def train(fit: Fit, staleness: int = 0) -> Result:
    """Plain DistributedModelParallel, with three other ways to the same numbers.

    Without `checkpoint()`, which needs other collectives on some ranks; by names, where the order of columns counts:
    TorchRec's own is another than that of the unsharded module; and with sums that are divided by hand in the place of
    row-wise means, since TorchRec divides columns of other tables.
    """
    parts, means = [], {}
    for part in fit.parts:
        summed = [table for table in part.tables if table.sharding == "row_wise" and table.pooling == "mean"]
        of_answers = zip(part.keys, [(table, one) for table in part.tables for one in table.features], strict=True)
        means[part.name] = {name: feature for name, (table, feature) in of_answers if table in summed}
        tables = [dataclasses.replace(table, pooling="sum") if table in summed else table for table in part.tables]
        use = "by_name" if part.use in ORDERED else part.use
        parts.append(dataclasses.replace(part, checkpoint="", use=use, tables=tuple(tables)))
    return _Loop(dataclasses.replace(fit, parts=tuple(parts)), staleness, means).train()


def train_under_the_strategy(fit: Fit, **options: Any) -> Result:
    """Lightning, with the plan of the loop."""
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    module = Net(fit)
    pipeline = EVERY_SECOND_BATCH if fit.pipeline == "auto" else fit.pipeline
    mode, others = mode_and_options(pipeline, {**dict(fit.options), **options})
    strategy = OverlapEmbeddingStrategy(
        mode, stream=fit.stream, sharding=make_plan(fit, module), timeout=COLLECTIVE_TIMEOUT, **others
    )
    trainer = make_trainer(
        strategy,
        max_epochs=fit.epochs,
        max_steps=fit.max_steps,
        accumulate_grad_batches=fit.accumulate,
        gradient_clip_val=fit.clip,
        num_sanity_val_steps=0,
        limit_val_batches=2 if fit.validate_every else 0,
        val_check_interval=fit.validate_every or None,
    )
    with warnings.catch_warnings(action="ignore"), mock.patch.dict(os.environ):
        os.environ.pop("PL_GLOBAL_SEED", None)  # of an earlier `seed_everything`: Lightning would seed anew
        seed_dropout(fit, dist.get_rank())  # set-up draws nothing from now on
        trainer.fit(module, datamodule=Data(fit))
    return collect(module, trainer.optimizers[0], module.losses)  # type: ignore[arg-type]


def differences(fit: Fit) -> list[str]:
    """Train a fit under the strategy and as it should be; return what is not equal bit for bit, or `NOT_DRAWN`.

    A stale mode whose delays no loop can tell is compared with its own deferring form. Where the arithmetic is that of
    the unsharded module, it is compared with that as well, to rounding.
    """
    if fit.stale and not fit.delays_are_defined:
        held = fit.pipeline == "semi_sync_deferred"
        other = dataclasses.replace(fit, pipeline="semi_sync") if held else fit
        options = {} if held else {"defer_update": True}
        return train_under_the_strategy(fit).differences(train_under_the_strategy(other, **options))
    try:
        expected = train(fit, fit.staleness if fit.stale else 0)
    except Exception as err:
        return [f"{NOT_DRAWN}{type(err).__name__}: {err}"]
    trained = train_under_the_strategy(fit)
    return trained.differences(expected) + differences_from_unsharded(fit, trained)
