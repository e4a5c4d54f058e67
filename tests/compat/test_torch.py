"""What PyTorch's private names have to mean."""

import copy
import gc
import pickletools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap.compat import torch as compat
from lightning_overlap.profiling.host_syncs import record_host_syncs

from ..support.ranks import Ranks
from .meanings import Meanings

pytestmark = pytest.mark.smoke
meanings = Meanings()


@meanings.of("torch.Tensor._version")
def test_writes_are_counted() -> None:
    tensor = torch.zeros(4)
    view = tensor[1:]
    before = compat.num_writes(tensor)
    tensor.sum()
    assert compat.num_writes(tensor) == before
    view.add_(1)
    assert compat.num_writes(tensor) == compat.num_writes(view) == before + 1


class _Refuses(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(func.__name__)


@meanings.of("torch._C.DisableTorchFunctionSubclass")
def test_subclasses_are_plain_tensors() -> None:
    tensor = torch.ones(2).as_subclass(_Refuses)
    with pytest.raises(TypeError, match="sum"):
        tensor.sum()
    with compat.as_plain_tensors():
        assert type(tensor.detach()) is Tensor
        assert tensor.sum() == 2


class _Wraps(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(func.__name__)


@meanings.of("torch.Tensor._make_wrapper_subclass")
def test_a_wrapper_has_a_form_and_no_memory() -> None:
    own = torch.ones(2, 3, dtype=torch.float16)
    made = compat.wrapper_of(_Wraps, own)
    assert type(made) is _Wraps
    assert (made.shape, made.dtype, made.device) == (own.shape, own.dtype, own.device)
    with pytest.raises(TypeError, match="sum"):
        made.sum()
    with pytest.raises(TypeError, match="detach"):
        torch.vmap(Tensor.detach)(made)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        nn.Parameter(torch.zeros(2, 3)).data = made


@meanings.of("torch.nn.Module._buffers", "torch.nn.Module._parameters")
def test_what_a_module_has_registered_is_no_attribute() -> None:
    module: Any = nn.BatchNorm1d(2)
    module.child, module.kept = nn.Linear(2, 2), [1]
    assert compat.buffers_of(module)["running_mean"] is module.running_mean
    module.running_mean = torch.ones(2)
    assert compat.buffers_of(module)["running_mean"] is module.running_mean
    attributes = compat.attributes_of(module)
    assert attributes["kept"] == [1]
    assert attributes["num_features"] == 2
    registered = [*module.parameters(), *module.buffers(), *module.children()]
    inside = [one for value in attributes.values() if isinstance(value, dict) for one in value.values()]
    assert not any(one is other for one in registered for other in inside)


@meanings.of("torch._has_compatible_shallow_copy_type")
def test_modules_ask_before_they_set_data() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2))
    module.weight.__class__ = type("Asked", (_Refuses, nn.Parameter), {})
    with pytest.raises(TypeError, match=compat.ASKED_BY_APPLY):
        module._apply(lambda weight: torch.ones(2))


@meanings.of("torch._C._current_graph_task_id", "torch.autograd.Variable._execution_engine")
def test_backwards() -> None:
    """Each has a number of its own, also within another one; what is to be called then is called at its end."""
    seen: list[Any] = []

    def inner(gradient: Tensor) -> None:
        seen.append(compat.current_backward())
        compat.call_after_backward(lambda: seen.append("end"))
        with torch.enable_grad():
            other = torch.ones(1, requires_grad=True)
            other.register_hook(lambda _: seen.append(compat.current_backward()))
            (other * 2).sum().backward()

    for _ in range(2):
        weight = torch.ones(1, requires_grad=True)
        product = weight * 2
        weight.register_hook(lambda _: seen.append("weight"))
        product.register_hook(inner)
        assert compat.current_backward() == -1
        (product * 3).sum().backward()
    assert compat.current_backward() == -1
    first, nested, *words = seen[:4]
    second, again = seen[4:6]
    assert words == seen[6:] == ["weight", "end"]
    assert len({-1, first, nested, second, again}) == 5


@meanings.of("torch._C._len_torch_dispatch_stack", "torch._C._len_torch_function_stack")
def test_modes_that_watch() -> None:
    assert not compat.modes_watch()
    for mode in (TorchFunctionMode(), TorchDispatchMode()):
        with mode:
            assert compat.modes_watch()
        assert not compat.modes_watch()


@meanings.of("torch.autograd._get_sequence_nr", "torch.autograd.graph.Node._sequence_nr")
@meanings.of("torch._C._current_autograd_node")
def test_nodes_are_numbered_as_they_are_made() -> None:
    """A leaf's node has the largest number, so that it runs first; a hook sees the node that runs."""
    weight = torch.ones(1, requires_grad=True)
    first = compat.next_sequence_number()
    double = weight * 2
    triple = double * 3
    assert [compat.sequence_number(one.grad_fn) for one in (double, triple)] == [first, first + 1]
    assert compat.next_sequence_number() == first + 2
    leaf: Any = get_gradient_edge(weight).node
    assert compat.sequence_number(leaf) > first + 2
    seen: list[Any] = []
    for one in (double, triple):
        one.grad_fn.register_prehook(lambda _: seen.append(compat.current_node()))
    triple.sum().backward()
    assert seen == [triple.grad_fn, double.grad_fn]
    assert compat.current_node() is None


@meanings.of("torch._C._autograd._top_saved_tensors_default_hooks", "torch.autograd.forward_ad._current_level")
def test_checkpoints_and_forward_mode_are_seen() -> None:
    seen: list[bool] = []

    def forward(given: Tensor) -> Tensor:
        seen.append(compat.saving_is_hooked())
        return given.sin()

    given = torch.ones(2, requires_grad=True)
    for reentrant in (False, True):
        checkpoint(forward, given, use_reentrant=reentrant)
    assert seen == [True, False]
    with forward_ad.dual_level():
        assert compat.in_forward_ad()
    assert not compat.saving_is_hooked()
    assert not compat.in_forward_ad()


@meanings.of("torch._C._autograd._profiler_enabled")
def test_a_profiler_is_seen() -> None:
    assert not compat.is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert compat.is_profiled()
    assert not compat.is_profiled()


@meanings.of("torch.ops.aten._local_scalar_dense", "torch.ops.aten._to_copy", "torch.ops.aten._unique2")
@meanings.of("torch.OpOverload._schema", "torch.UntypedStorage._cdata")
def test_operators_tell_what_they_do() -> None:
    ran: list[Any] = []

    class Watch(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func)
            return func(*args, **(kwargs or {}))

    def ran_in(call: Callable[[], Any]) -> list[Any]:
        ran.clear()
        with Watch():  # type: ignore[no-untyped-call]
            call()
        return list(ran)

    tensor = torch.tensor([2.0, 1.0, 2.0])
    assert ran_in(lambda: tensor.to(torch.float64)) == [compat.COPY]
    for call in (tensor[0].item, tensor.unique):
        assert {one.overloadpacket.__name__ for one in ran_in(call)} & compat.SYNCING_OPERATORS
    written = {}
    for call in (lambda: tensor.add_(tensor.clone()), lambda: tensor.add(tensor)):
        func = ran_in(call)[-1]
        arguments = compat.arguments_of(func)
        written[func] = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    assert list(written.values()) == [["self"], []]
    other = tensor.clone()
    addresses = [compat.address_of(one.untyped_storage()) for one in (tensor, tensor[1:], other)]
    assert addresses[0] == addresses[1] != addresses[2]


@meanings.of("torch.optim.optimizer._get_value")
def test_an_optimizer_reads_its_count_of_steps_there() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([weight], foreach=False)
    weight.grad = torch.ones(1)
    with record_host_syncs() as found:
        optimizer.step()
    places = {(frame.filename, frame.name) for sync in found for frame in sync.stack}
    file, name = compat.READER_OF_STEPS
    assert any(place.endswith(file) and function == name for place, function in places)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(lambda *_: None),
    "forward_pre": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "full_backward": lambda module: module.register_full_backward_hook(lambda *_: None),
    "full_backward_pre": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
}


@meanings.of(*(f"torch.nn.Module.{name}" for name in ("_forward_hooks", "_forward_pre_hooks")))
@meanings.of(*(f"torch.nn.Module.{name}" for name in ("_backward_hooks", "_backward_pre_hooks")))
def test_hooks_are_seen_until_they_are_removed() -> None:
    module = nn.Linear(1, 1)
    seen = {}
    for name, register in HOOKS.items():
        with register(module):
            seen[name] = compat.num_forward_hooks(module), compat.changes_output(module)
            seen[name] += (compat.has_backward_hooks(module),)
    assert seen == {
        "forward": (1, True, False),
        "forward_pre": (1, False, False),
        "full_backward": (0, False, True),
        "full_backward_pre": (0, False, True),
    }
    assert (compat.num_forward_hooks(module), compat.has_backward_hooks(module)) == (0, False)


@meanings.of("torch._dynamo.OptimizedModule", "torch.nn.Module._compiled_call_impl", "torch.nn.Module._modules")
def test_modules_tell_their_children_and_who_compiles_them() -> None:
    ran: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append("compiled code")
            return graph.forward(*args)

        return run

    class Doubles(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            return given * 2

    plain, called = Doubles(), Doubles()
    called.compile(backend=backend)
    for module in (plain, called, torch.compile(plain, backend=backend)):
        ran.clear()
        module(torch.ones(1))
        assert compat.is_compiled(module) == bool(ran)
    module = nn.Sequential(nn.Linear(1, 1))
    compat.children_of(module)["0"] = lambda given: given + 1
    assert module(torch.ones(1)).item() == 2


@meanings.of("torch.nn.Module._call_impl", "torch.nn.Module._compiled_call_impl")
def test_calls_of_a_module_are_replaced_and_compiled_code_runs_its_own_forward() -> None:
    """Also in a full graph. Hooks run in a call with hooks, and a copy of the module has its own calls."""
    module, seen = nn.Linear(1, 1), []
    module.register_forward_hook(lambda *_: seen.append("hook"))

    def call(given: Tensor) -> Tensor:
        seen.append("call")
        found: Tensor = compat.call_with_hooks(module, given)
        return found

    for hooked in (True, False):
        seen.clear()
        compat.replace_calls(module, call)
        assert compat.is_compiled(module)
        module(torch.ones(1, 1))
        copy.deepcopy(module)(torch.ones(1, 1))
        assert seen == (["call", "hook", "hook"] if hooked else ["call"])
        if not hooked:
            torch.compile(lambda given: module(given) * 2, backend="eager", fullgraph=True)(torch.ones(1, 1))
            assert seen == ["call"]
        compat.restore_calls(module, call)
        module(torch.ones(1, 1))
        assert "call" not in seen[3 if hooked else 1 :]
        module._forward_hooks.clear()


@meanings.of("torch.nn.Module.state_dict._metadata")
def test_loading_hands_the_versions_of_a_state_dict_to_the_modules() -> None:
    """BatchNorm of version 1 had no `num_batches_tracked`: without versions its absence is taken for that version."""
    saved = nn.BatchNorm1d(1).state_dict()
    del saved["num_batches_tracked"]
    copied = OrderedDict(saved)
    nn.BatchNorm1d(1).load_state_dict(copied)
    compat.take_versions(copied, saved)
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        nn.BatchNorm1d(1).load_state_dict(copied)


@meanings.of("torch.nn.Module._load_from_state_dict")
def test_a_function_stands_around_the_loading_of_a_module_and_its_hooks() -> None:
    seen: list[str] = []

    def around(state_dict: dict[str, Any], prefix: str, load_own: compat.LoadOwn) -> None:
        seen.append(f"before {prefix}")
        state_dict[f"{prefix}bias"] = torch.ones(1)
        load_own(state_dict, prefix)
        seen.append("after")

    module = nn.Sequential(nn.Linear(1, 1))
    module[0].register_load_state_dict_pre_hook(lambda module, state_dict, *_: seen.append("hook"))
    compat.load_around(module[0], around)
    found = module.load_state_dict({"0.weight": torch.zeros(1, 1)})
    assert (seen, found.missing_keys, module[0].bias.tolist()) == (["before 0.", "hook", "after"], [], [1.0])


@meanings.of(
    "torch._C._functorch.peek_interpreter_stack", "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack"
)
def test_outside_of_transformations_of_functions_tensors_belong_to_none() -> None:
    """There leaves and autograd functions can be made; what the transformation computes from them has their graph."""
    made: list[Tensor] = []

    def run(given: Tensor) -> Tensor:
        assert compat.in_function_transform()
        with compat.outside_function_transforms():
            assert not compat.in_function_transform()
            made.append(torch.ones(2).requires_grad_())
        assert compat.in_function_transform()
        return (given * made[0]).sum()

    found, _ = torch.func.vjp(run, torch.full((2,), 3.0))
    assert not compat.in_function_transform()
    found.backward()
    assert made[0].grad is not None
    assert made[0].grad.tolist() == [3, 3]


def test_what_is_never_compiled_is_called_by_compiled_code_and_not_traced() -> None:
    """Nor what it calls; in a full graph it is an error with the reason."""
    compiling: list[bool] = []

    def inner(given: Tensor) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return given + 1

    @compat.never_compile_methods
    class Has:
        def method(self, given: Tensor) -> Tensor:
            return inner(given)

        @property
        def number(self) -> Tensor:
            return inner(torch.zeros(1))

    has, function = Has(), compat.never_compiled(inner)

    def run(given: Tensor) -> Tensor:
        return function(given * 2) + has.method(given) + has.number

    assert torch.compile(run, backend="eager")(torch.ones(1)).item() == 6
    assert compiling == [False] * 3
    torch._dynamo.reset()  # it would go on with what it has compiled
    with pytest.raises(torch._dynamo.exc.Unsupported, match="outside of compiled code"):
        torch.compile(run, backend="eager", fullgraph=True)(torch.ones(1))


@meanings.of(*(f"torch.nn.Parameter.{name}" for name in compat.PRIVATE_NAMES["torch.nn.Parameter"]))
@meanings.of(
    *(
        f"torch.distributed.optim.apply_optimizer_in_backward.{name}"
        for name in compat.PRIVATE_NAMES["torch.distributed.optim.apply_optimizer_in_backward"]
    )
)
def test_optimizers_in_the_backward() -> None:
    """torch steps them; TorchRec's filter knows a parameter that has one; nothing holds one that is forgotten."""
    applied = torch.optim.SGD, {"lr": 0.5}
    weight, noted, marked = (nn.Parameter(torch.ones(1)) for _ in range(3))
    assert compat.applied_in_backward(weight) is None
    compat.apply_in_backward(weight, applied)
    assert compat.applied_in_backward(weight) == applied
    weight.sum().backward()
    assert (weight.item(), weight.grad) == (0.5, None)

    compat.note_in_backward(noted, applied)
    assert compat.applied_in_backward(noted) == applied
    noted.sum().backward()
    assert noted.item() == 1  # no optimizer was made
    shared = compat.applied_in_backward(noted)
    told = {"lr": 0.25}
    compat.tell_in_backward(noted, told)
    own = compat.applied_in_backward(noted)
    assert shared == applied  # not written
    assert own == (torch.optim.SGD, told)
    assert own[1] is not told

    compat.mark_in_backward(marked, [object()])
    named = [("weight", weight), ("marked", marked), ("plain", nn.Parameter(torch.ones(1)))]
    assert [name for name, _ in in_backward_optimizer_filter(iter(named))] == ["plain"]

    gone = weakref.ref(weight)
    compat.forget_in_backward(weight)
    weight.grad = None
    weight.sum().backward()
    assert weight.item() == 0.5  # no hook is left
    assert [name for name, _ in in_backward_optimizer_filter(iter(named[:1]))] == ["weight"]
    del weight, named
    gc.collect()
    assert gone() is None


@meanings.of("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", "torch.serialization._get_layout")
def test_a_folder_names_nothing_else_that_is_private(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    operators = pickletools.genops((tmp_path / ".metadata").read_bytes())
    words = [given for _, given, _ in operators if isinstance(given, str)]
    private = {word for word in words if word.startswith("_") and word.isidentifier()}
    assert private - {compat.StoragePlace.__name__} == {name for _, name in compat.NAMES_IN_METADATA}


@meanings.of(
    *(f"torch.distributed.ProcessGroup.{name}" for name in compat.PRIVATE_NAMES["torch.distributed.ProcessGroup"]),
    "DistributedDataParallel._comm_hooks",
    "torch.distributed.distributed_c10d._get_default_store",
    "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "ShardedTensor._init_from_local_shards_and_global_metadata",
)
def test_of_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.run(of_ranks) == [["0", "1"], ["0", "1"]]


def of_ranks() -> list[str]:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    store = compat.default_store()
    store.set(f"compat/{rank}", str(rank))
    module = nn.ModuleDict({"trained": nn.Linear(2, 1, bias=False), "left": nn.Linear(2, 1, bias=False)})
    compat.ignore_in_ddp(module, ["left.weight"])
    wrapped = nn.parallel.DistributedDataParallel(module)
    assert not compat.has_comm_hook(wrapped)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    assert compat.has_comm_hook(wrapped)
    assert [name for name, _ in wrapped.module.named_parameters()] == ["trained.weight", "left.weight"]
    assert {"left.weight"} == set(wrapped.parameters_to_ignore)
    places = [ShardMetadata([2 * owner, 0], [2, 3], f"rank:{owner}/cpu") for owner in range(2)]
    metadata = ShardedTensorMetadata(places, torch.Size([4, 3]), TensorProperties(dtype=torch.float32))
    if rank == 0:  # no collective: the other rank makes none
        made = compat.sharded_tensor([Shard(torch.ones(2, 3), places[0])], metadata)
        assert made.size() == torch.Size([4, 3])
        assert [shard.tensor.sum().item() for shard in made.local_shards()] == [6.0]
    store.wait([f"compat/{other}"])
    over_gloo(rank)
    return sorted(store.get(f"compat/{one}").decode() for one in (rank, other))


def over_gloo(rank: int) -> None:
    """Do collectives of a group over gloo by torch's public functions; a tensor without shards here is on the host."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        return compat.OverGloo(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), rank, size)

    if "over_gloo" not in dist.Backend.backend_list:
        dist.Backend.register_backend("over_gloo", create, devices=["cpu"])
    group = dist.new_group(backend="over_gloo")
    mine = torch.full((2,), float(rank + 1))
    gathered, scattered = torch.empty(4), torch.empty(2)
    dist.all_reduce(summed := mine.clone(), group=group)
    dist.all_gather_into_tensor(gathered, mine, group=group)
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0), group=group)
    assert (summed.tolist(), gathered.tolist()) == ([3.0, 3.0], [1.0, 1.0, 2.0, 2.0])
    assert scattered.tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]
    shards = [Shard(mine, ShardMetadata([0], [2], "rank:0/cpu"))] if rank == 0 else []
    assert init_from_local_shards(shards, 2, process_group=group).device.type == "cpu"
    dist.destroy_process_group(group)


def test_each_listed_name_has_a_test() -> None:
    assert meanings.without_test(compat.PRIVATE_NAMES) == set()


def test_newer_names_go_to_a_gloo_that_has_them() -> None:
    class Gloo:  # of a later torch
        def all_gather_single(self, *args: Any) -> Any:
            return "all_gather_single", args

        def _reduce_scatter_base(self, *args: Any) -> Any:
            return "_reduce_scatter_base", args

    class Group:
        gloo = Gloo()

    compat._hand_on(Group, Gloo)
    group: Any = Group()
    assert group.all_gather_single(1, 2) == ("all_gather_single", (1, 2))
    assert group.reduce_scatter_single(3) == ("_reduce_scatter_base", (3,))
    assert not hasattr(group, "broadcast"), "this gloo lacks it: the base class answers"
