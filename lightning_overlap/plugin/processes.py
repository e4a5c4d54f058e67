"""A strategy that is copied, pickled, or starts processes by `spawn` or `fork`, whose parent gets whole tables back."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from typing_extensions import override

from ..checkpoint import gather
from ..compat.lightning import (
    ProcessLauncher,
    set_launcher,
    start_method,
    starts_python_processes,
    without_module,
    wrap_launcher,
)
from ..tables import apply_table_optimizers, find_tables, has_tables, sharded_modules, table_optimizers
from ..text import some
from .run import HasRun
from .stored_checkpoints import finds_whole_checkpoints

_NOT_IN_NOTEBOOKS = (
    "a notebook or an interactive Python has no script that {number} processes could run. For several devices use "
    "strategy='overlap_embedding_notebook', or OverlapEmbeddingStrategy(start_method='fork', ...): it forks this "
    "process, which must not have used CUDA or trained on one device before. devices=1 works with any start_method; a "
    "script works with any number of devices."
)

_TABLE_OPTIMIZERS = "table_optimizers"  # entry of a copy's state: the optimizers applied in backward to its tables


class StartsProcesses(HasRun):
    """The hooks of a strategy around copies of it, and around the processes that it starts."""

    _parents_state: frozenset[str] | None = None  # names in the parent's `state_dict`, for a fit in started processes

    @override
    def __getstate__(self) -> dict[str, Any]:
        new = object.__new__(type(self))
        new.forget_run()
        state = {name: value for name, value in super().__getstate__().items() if name not in vars(new)}
        if self._is_sharded:
            # Shards cannot be copied, so neither can module and optimizers: the copied trainer has no module.
            return without_module(state)
        module = self.lightning_module
        return state | {_TABLE_OPTIMIZERS: {} if module is None else table_optimizers(module)}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        recorded = state.pop(_TABLE_OPTIMIZERS, {})
        super().__setstate__(state)
        self.forget_run()
        if self.lightning_module is not None:
            apply_table_optimizers(self.lightning_module, recorded)

    @override
    def _make_launcher(self) -> None:
        self._choose_launcher()
        if starts_python_processes(self.launcher):
            set_launcher(self, Launcher(self, start_method(self)))  # type: ignore[arg-type]
        wrap_launcher(self, finds_whole_checkpoints)

    def _choose_launcher(self) -> None:
        is_interactive = hasattr(sys, "ps1") or sys.flags.interactive  # Lightning's own test
        if is_interactive and start_method(self) == "popen":
            if self.world_size == 1:
                set_launcher(self, None)  # Lightning's launcher would start no process, and is refused in notebooks
                return
            if self.cluster_environment is None or not self.cluster_environment.creates_processes_externally:
                raise ValueError(_NOT_IN_NOTEBOOKS.format(number=self.world_size))
        super()._make_launcher()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if start_method(self) == "fork" and self.lightning_module is not None and has_tables(self.lightning_module):
            # A forked process lacks the OpenMP threads of its parent and would wait for them forever; one thread works.
            torch.set_num_threads(1)

    @override
    def setup(self, trainer: Trainer) -> None:
        if start_method(self) == "forkserver" and self.model is not None:
            own_memory(self.model)
        super().setup(trainer)
        if self._parents_state is not None and self.lightning_module is not None:
            _check_same_tables(self.lightning_module, self._parents_state, start_method(self))


def own_memory(module: nn.Module) -> None:
    """Copy the tensors that all started processes share, as Lightning does for `spawn` but not for `forkserver`."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.is_shared():
            tensor.data = tensor.data.clone()


class Launcher(ProcessLauncher):
    """Lightning's launcher by `spawn`, `fork` or `forkserver`, which also handles sharded tables."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        module = self.strategy.lightning_module
        if trainer is not None and module is not None:
            with_tables = has_tables(module)
            if with_tables:
                _refuse_launch(self.strategy, start_method(self.strategy), module, trainer)
            if trainer.state.fn == TrainerFn.FITTING:
                self.strategy._parents_state = frozenset(module.state_dict() if with_tables else ())
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:
            self.strategy._parents_state = None

    @override
    def run_in_process(self, number: int, trainer: Any, function: Callable[..., Any], *args: Any) -> None:
        try:
            super().run_in_process(number, trainer, finds_whole_checkpoints(trainer, function), *args)
        except Exception as err:
            # The parent raises the error of any rank. Lightning calls no `on_exception` in a started process.
            self.strategy.note_cause(err)
            raise

    @override
    def collect_results(self, trainer: Trainer, results: Any) -> Any:
        module = trainer.lightning_module
        if trainer.state.fn != TrainerFn.FITTING or not sharded_modules(module):
            return super().collect_results(trainer, results)

        # Lightning takes the module's state on every rank, and saves the state of rank 0 for the parent.
        def make_whole(_: nn.Module, state: dict[str, Any], *args: Any) -> None:
            state.update(gather(state, self.strategy.checkpoint_group))

        with module.register_state_dict_post_hook(make_whole):  # type: ignore[no-untyped-call]
            return super().collect_results(trainer, results)


_OTHERWISE = "or start a process per rank: run the script itself (start_method='popen', the default), or torchrun."


def _check_same_tables(module: nn.Module, of_parent: frozenset[str], method: str) -> None:
    """Refuse tables in a started process that its parent's `state_dict` lacks: Lightning would silently drop them."""
    sharded = tuple(f"{name}." for name in sharded_modules(module))
    here, there = ({key for key in keys if key.startswith(sharded)} for keys in (module.state_dict(), of_parent))
    if here != there:
        mine, theirs = (some(sorted(keys)) or "nothing" for keys in (here - there, there - here))
        raise ValueError(
            f"start_method={method!r}: the trained module has {mine} where the module of the parent process has "
            f"{theirs}, so the parent could not take the trained tables. Make all tables in the module's __init__, not "
            f"in setup or configure_model, {_OTHERWISE}"
        )


def _refuse_launch(strategy: DDPStrategy, method: str, module: LightningModule, trainer: Trainer) -> None:
    on_meta = [table.path for table in find_tables(module) if table.parameter.is_meta]
    if sharded_modules(module):
        reason = "the module was sharded in this process. Make it anew (load a checkpoint of it)"
    elif method == "fork" and dist.is_initialized():
        raise RuntimeError(
            "start_method='fork': this process has a process group from an earlier fit or evaluation, which the "
            "started processes would take for theirs. Call torch.distributed.destroy_process_group() first, restart "
            "the notebook's kernel, or use start_method='spawn'."
        )
    elif trainer.state.fn != TrainerFn.FITTING:
        return  # nothing is given back
    elif strategy.num_nodes > 1:
        reason = "tables are given back on the first of several nodes only. Train on one node"
    elif any(isinstance(part, BaseManagedCollisionEmbeddingCollection) for part in module.modules()):
        reason = "managed collision modules cannot be given back: each shard assigns rows to the ids that its rank gets"
        reason += ". Use plain tables"
    elif on_meta:
        reason = f"{', '.join(sorted(on_meta))} are on the meta device in this process, which cannot take trained rows"
        reason += ". Make them on a CPU"
    else:
        return
    raise ValueError(f"start_method={method!r}: {reason}, {_OTHERWISE}")
