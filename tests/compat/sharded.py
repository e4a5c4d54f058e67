"""Sharded modules of TorchRec's, without this package's changes to them. Run by ranks."""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingEnv
from torchrec.modules import mc_embedding_modules, mc_modules
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap.compat import torchrec

from ..support.modules import (
    BATCH_SIZE,
    FEATURES,
    Placement,
    bags,
    copies,
    draw_weights,
    halves,
    managed_bags,
    managed_sequences,
    means,
    plain_ids,
    plan_by_place,
    position_weighted,
    rows,
    sequences,
    variable_batch_alike,
    whole,
)

MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "bags": bags,
    "weighted": lambda: bags(weighted=True),
    "means": means,
    "sequences": sequences,
    "position_weighted": position_weighted,
    "managed_bags": lambda: managed_bags(3),
    "managed_sequences": lambda: managed_sequences(3),
}
PLACES: Mapping[str, Placement] = {
    "whole": whole,
    "rows": rows,
    "copies": copies,
    "halves": lambda table: halves(0, 1),
}


class Sharded(NamedTuple):
    """A module that is sharded with a type for each of its tables."""

    kind: str
    places: Sequence[str]
    variable: bool = False  # whether batch sizes vary by feature


def shard(of: Sharded, **options: Any) -> Any:
    """Return the sharded module, with the same weights and an SGD for its tables in the backward."""
    model = nn.ModuleDict({"module": MODULES[of.kind]()})
    draw_weights(model, 3, 1.0)
    for name, parameter in model.named_parameters():
        if name.endswith(".weight") and of.places[int(name.split(".")[-2].removeprefix("t"))] != "copies":
            _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5})
    sharders = [EmbeddingCollectionSharder(**options)] if options else get_default_sharders()
    assert dist.group.WORLD is not None
    DistributedModelParallel(
        model,
        ShardingEnv.from_process_group(dist.group.WORLD),
        torch.device("cpu"),
        plan_by_place(model, lambda module: lambda table: PLACES[of.places[table]](table)),
        sharders,
    )
    lookups = [lookup for one in model.modules() for lookup in vars(one).get("_lookups", ())]
    for kernel in [part for lookup in lookups for part in lookup.modules() if hasattr(part, "split_embedding_weights")]:
        for number, weight in enumerate(kernel.split_embedding_weights()):  # TorchRec has drawn others
            weight.data.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    return model["module"]


def ids_for(of: Sharded) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    kjt = variable_batch_alike(generator) if of.variable else plain_ids(generator)
    if of.kind == "weighted":
        weights = torch.rand(kjt.values().numel(), generator=generator)
        return KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, kjt.lengths())
    return kjt


def received(module: Any, kjt: KeyedJaggedTensor) -> tuple[Any, Any]:
    """Return a context, and the ids that this rank looks up."""
    context = module.create_context()
    return context, module.input_dist(context, kjt).wait().wait()


def tensors(embeddings: Any) -> dict[str, Tensor]:
    if isinstance(embeddings, KeyedTensor):
        return embeddings.to_dict()
    return {name: one.values() if isinstance(one, JaggedTensor) else one for name, one in embeddings.items()}


def step(embeddings: Any) -> dict[str, list[Any]]:
    """Make the backward of embeddings that were waited for; return them."""
    found = tensors(embeddings)
    scales = torch.linspace(1, 2, len(found))
    sum((one.square() * scale).sum() for one, scale in zip(found.values(), scales, strict=True)).backward()
    return {name: one.tolist() for name, one in found.items()}


def weights_of(module: Any) -> dict[str, Any]:
    dense = dict(in_backward_optimizer_filter(module.named_parameters()))
    gradients = {name: None if one.grad is None else one.grad.tolist() for name, one in dense.items()}
    tables = [table.tolist() for lookup in torchrec.lookups_of(module) for table in lookup.parameters()]
    return {"gradients": gradients, "tables": tables}


def by_parts(of: Sharded, order: Sequence[int], together: int) -> None:
    """Look up parts in some order, some together; compare with TorchRec's own `compute_and_output_dist`."""
    expected, module = shard(of), shard(of)
    kjt = ids_for(of)
    looked_up: list[int] = []
    for part, lookup in enumerate(torchrec.lookups_of(module)):
        lookup.register_forward_hook(lambda *_, part=part: looked_up.append(part))
    for _ in range(2):
        theirs = step(expected.compute_and_output_dist(*received(expected, kjt)).wait())
        context, dist_input = received(module, kjt)
        before = dict(vars(module))
        parts = [part for part in order if part < len(torchrec.lookups_of(module))]
        started: dict[int, Any] = {}
        for some in together_in(parts, together):
            embeddings = torchrec.compute_parts(module, context, dist_input, some)
            for part in some:
                started[part] = torchrec.start_output_dist(module, context, part, embeddings[part])
        ours = step(torchrec.assembled(module, context, [started[part] for part in sorted(parts)]).wait())
        assert vars(module) == before  # nothing of the module was replaced
        assert looked_up == [part for some in together_in(parts, together) for part in sorted(some)]  # each once
        looked_up.clear()
        assert ours == theirs
        assert weights_of(module) == weights_of(expected)


def together_in(parts: Sequence[int], num: int) -> list[Sequence[int]]:
    return [parts[at : at + num] for at in range(0, len(parts), num)]


def tables_and_kernels(of: Sharded) -> None:
    """Compare what a module's functions say with its configs and its plan; replace a kernel, and see it used."""
    module = shard(of)
    bag = of.kind in ("bags", "weighted")
    configs = torchrec.configs_of_bags(module) if bag else torchrec.configs_of_sequences(module)
    assert [config.name for config in configs] == [f"t{table}" for table in range(3)]
    shardings = torchrec.shardings_of_bags(module) if bag else torchrec.shardings_of_sequences(module)
    assert torchrec.group_of(module) is dist.group.WORLD
    assert len(torchrec.output_dists_of(module)) == len(torchrec.lookups_of(module)) == len(shardings)
    context, dist_input = received(module, ids_for(of))
    before = tensors(module.compute_and_output_dist(context, dist_input).wait())
    seen: list[int] = []
    for part, dist_of_part in enumerate(torchrec.output_dists_of(module)):
        dist_of_part.register_forward_hook(lambda *_, part=part: seen.append(part))
    doubled = set()
    for sharding, lookup in zip(shardings, torchrec.lookups_of(module), strict=True):
        for number, (tables, kernel) in enumerate(torchrec.kernels_in(lookup)):
            assert {module.module_sharding_plan[table.name].sharding_type for table in tables} == {sharding}
            shapes = [tuple(weight.shape) for weight in kernel.split_embedding_weights()]
            assert shapes == [(table.local_rows, table.local_cols) for table in tables]
            doubled |= {table.name for table in tables}
            if sharding != "data_parallel":
                torchrec.replace_kernel(lookup, number, Doubling(kernel))
    after = tensors(module.compute_and_output_dist(*received(module, ids_for(of))).wait())
    assert seen == [*range(len(shardings))]
    for config in configs:
        kind = module.module_sharding_plan[config.name].sharding_type
        for feature in config.feature_names:
            factor = 1 if kind == "data_parallel" else 2
            assert torch.equal(after[feature], factor * before[feature]), (kind, feature)


class Doubling(nn.Module):
    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        doubled: Tensor = 2 * self.kernel(*args, **kwargs)
        return doubled


def unordered_ids(of: Sharded) -> list[int] | None:
    """Send ids in the order of their ranks, once by TorchRec and once put in this order by the caller."""
    module = shard(of)
    kjt = ids_for(of)
    assert torchrec.features_order(module) is None  # the first `input_dist` makes more than an order
    own = received(module, kjt)[1]
    order = torchrec.features_order(module)
    if order is not None:
        context = module.create_context()
        given = torchrec.input_dist_unordered(module, context, kjt.permute(order)).wait().wait()
        assert [one.keys() for one in given] == [one.keys() for one in own]
        for ours, theirs in zip(given, own, strict=True):
            assert torch.equal(ours.values(), theirs.values())
            assert torch.equal(ours.lengths(), theirs.lengths())
        module._free_features_storage_early = True  # then TorchRec keeps what it is to free
        early = module.create_context()
        module.input_dist(early, kjt)
        assert early.early_releasable_inputs == [kjt]
        assert torchrec.features_order(module) is None
        module._free_features_storage_early = False
        module._enabled_feature_score_auto_collection = True  # then TorchRec gives weights to ids
        module._sharding_type_feature_score_mapping = {"table_wise": dict.fromkeys(FEATURES, 0.5)}
        weights = [one.weights_or_none() for one in received(module, kjt)[1]]
        assert all(one is not None for one in weights)
        assert torchrec.features_order(module) is None
    return order


def sent_by(of: Sharded) -> list[int]:
    """Return how often each part's all-to-all of ids is called in an `input_dist`; -1 for parts without one."""
    module = shard(of)
    received(module, ids_for(of))
    all_to_alls = list(map(torchrec.all_to_all_of, torchrec.input_dists_of(module)))
    calls: list[int] = []
    for part, all_to_all in enumerate(all_to_alls):
        if all_to_all is not None:
            all_to_all.register_forward_hook(lambda *_, part=part: calls.append(part))
    received(module, ids_for(of))
    return [-1 if one is None else calls.count(part) for part, one in enumerate(all_to_alls)]


def options(kind: str) -> list[bool]:
    module = shard(Sharded(kind, ["rows"] * 3))
    if kind == "sequences":
        deduplicating = shard(Sharded(kind, ["rows"] * 3), use_index_dedup=True)
        try:
            received(deduplicating, ids_for(Sharded(kind, [])))
            fails = False
        except (RuntimeError, NotImplementedError, AttributeError) as err:  # a CPU has no operator for it
            fails = "jagged_unique_indices" in str(err)
        return [torchrec.has_index_dedup(deduplicating) and fails, torchrec.has_index_dedup(module)]
    return [torchrec.is_weighted(module)]


def means_and_sums(place: str) -> bool:
    """Return whether a module returns sums where it returned means, once it was told to divide none."""
    of = Sharded("means", [place] * 3)
    module, summing = shard(of), shard(of)
    torchrec.divide_no_means(summing)
    kjt = ids_for(of)
    kept, sums = (tensors(one.compute_and_output_dist(*received(one, kjt)).wait()) for one in (module, summing))
    counts = dict(zip(kjt.keys(), kjt.lengths().view(3, BATCH_SIZE).clamp(min=1).unsqueeze(2), strict=True))
    are_sums = all(torch.allclose(sums[name] / counts[name], kept[name]) for name in kept)
    assert are_sums or all(torch.equal(sums[name], kept[name]) for name in kept)
    return are_sums


def whole_weights_go() -> None:
    """TorchRec keeps the weights from which a collection was sharded."""
    held: list[weakref.ref[Any]] = []
    make = MODULES["bags"]

    def noting() -> nn.Module:
        module = make()
        held.extend(weakref.ref(parameter) for parameter in module.parameters())
        return module

    of = Sharded("noted", ["whole", "rows", "halves"])
    MODULES["noted"] = noting  # type: ignore[index]
    try:
        module = shard(of)
    finally:
        del MODULES["noted"]  # type: ignore[attr-defined]
    torch.distributed.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map.clear()  # type: ignore[attr-defined]
    torch.distributed.optim.apply_optimizer_in_backward.param_to_acc_grad_map.clear()  # type: ignore[attr-defined]
    gc.collect()
    assert any(one() is not None for one in held)
    torchrec.forget_whole_weights(module)
    gc.collect()
    assert [one() for one in held] == [None] * len(held)
    step(module.compute_and_output_dist(*received(module, ids_for(of))).wait())


def inner_modules(kind: str) -> None:
    """The ids of a module go through the input dists of its inner one, and its tables are in it."""
    managed = kind.startswith("managed")
    module, kjt = shard(Sharded(kind, ["rows" if managed else "whole"] * 3)), ids_for(Sharded(kind, []))
    tables = torchrec.tables_within(module) if managed else torchrec.bags_within(module)
    exchange = torchrec.collisions_within(module) if managed else tables
    received(module, kjt)
    calls: list[int] = []
    dists = torchrec.input_dists_of(exchange)
    for number, input_dist in enumerate(dists):
        input_dist.register_forward_hook(lambda *_, number=number: calls.append(number))
    received(module, kjt)
    assert calls == [*range(len(dists))]
    assert calls
    assert {name.split(".")[-2] for name, _ in tables.named_parameters()} == {f"t{table}" for table in range(3)}
    if not managed:
        before = tensors(module(kjt).wait())
        with torch.no_grad():
            for weight in torchrec.feature_processors_of(module).parameters():
                weight.mul_(2)
        after = tensors(module(kjt).wait())
        assert all(torch.allclose(after[name], 2 * before[name]) for name in before)


def optimizers_and_slices() -> None:
    """An optimizer's rate reaches the kernel; a slice with the same rows shares their memory."""
    module = shard(Sharded("bags", ["whole", "rows", "copies"]))
    for _, optimizer in module.fused_optimizer.optimizers:
        kernel = torchrec.kernel_of_optimizer(optimizer)
        optimizer.param_groups[0]["lr"] = 0.125
        optimizer.step()
        assert kernel.get_learning_rate() == 0.125
    assert torchrec.kernel_of_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))])) is None
    slices = [one for one in module.parameters() if isinstance(one, TableBatchedEmbeddingSlice)]
    assert slices
    for weight in slices:
        for needs_gradient in (True, False):
            same = torchrec.same_slice(type(weight), weight, needs_gradient=needs_gradient)
            assert same.requires_grad == needs_gradient
            with torch.no_grad():
                weight.add_(1)
            assert torch.equal(same.detach(), weight.detach())
            assert same.shape == weight.shape


def collectives(place: str) -> None:
    """Cut the graph of embeddings at the collective; the backward on from the cut gives what the whole one gives."""
    of = Sharded("bags", [place] * 3)
    expected, module = shard(of), shard(of)
    kjt = ids_for(of)
    step(expected.compute_and_output_dist(*received(expected, kjt)).wait())
    before = weights_of(module)
    awaitable = module.compute_and_output_dist(*received(module, kjt))
    found = list(torchrec.collectives_in(awaitable))
    is_alone = dist.get_world_size() == 1
    assert [torchrec.is_sent(one) for one in found] == [not is_alone] * len(found)
    assert found
    cuts = []
    for one in found:
        joint = torchrec.joint_of(one)
        assert joint is not None
        assert joint.requires_grad
        leaf = joint.detach().requires_grad_()
        torchrec.set_joint(one, leaf)
        assert torchrec.joint_of(one) is leaf
        cuts.append((joint, leaf))
        assert is_alone or torchrec.work_of(one) is not None
    embeddings = awaitable.wait()
    assert is_alone or all(torchrec.work_of(one) is None for one in found)
    step(embeddings)
    assert weights_of(module) == before
    for one, (joint, leaf) in zip(found, cuts, strict=True):
        assert is_alone or torchrec.work_of(one) is not None  # gradients are under way
        assert leaf.grad is not None
        if not is_alone:
            torchrec.set_joint(one, leaf)
        joint.backward(leaf.grad)
    assert weights_of(module) == weights_of(expected)


def _managed_table(hash_size: int, interval: int) -> Any:
    tables = EmbeddingBagCollection(tables=[EmbeddingBagConfig(21, 8, name="t0", feature_names=["f0"])])
    counting = mc_modules.MCHManagedCollisionModule(
        21, torch.device("cpu"), mc_modules.LFU_EvictionPolicy(), eviction_interval=interval, input_hash_size=hash_size
    )
    managed = mc_modules.ManagedCollisionCollection({"t0": counting}, tables.embedding_bag_configs())
    module: Any = mc_embedding_modules.ManagedCollisionEmbeddingBagCollection(tables, managed)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    plan = plan_by_place(nn.ModuleDict({"mc": module}), lambda _: rows)
    model = DistributedModelParallel(
        nn.ModuleDict({"mc": module}), env, torch.device("cpu"), plan, get_default_sharders()
    )
    return model.module["mc"]


def ranks_of_ids(hash_size: int) -> None:
    """A rank's managed collision module has seen the ids of all ranks that belong to it, and no others."""
    module = _managed_table(hash_size, interval=100)
    [own] = torchrec.collisions_within(module)._managed_collision_modules.values()
    drawn = [torch.randint(2000, (30,), generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    module(KeyedJaggedTensor(["f0"], drawn[dist.get_rank()], lengths=torch.ones(30).int()))[0].wait()
    ids = torch.stack([torch.cat(drawn), torch.zeros(60, dtype=torch.int64)], 1)[:, 0]  # not contiguous
    mine = ids[torchrec.ranks_of(own, ids, 2) == dist.get_rank()]
    assert 0 < len(mine) < len(ids)
    assert sorted(torchrec.seen_ids(own).ids.tolist()) == sorted(mine.tolist())


def reset_rows() -> None:
    """Only rows that are told of are reset, and only while they are; two may listen, and each stops alone."""
    module = _managed_table(1000, interval=1)
    [weight] = module.parameters()
    told: list[list[tuple[Tensor, Tensor]]] = [[], []]

    def listen(number: int) -> Callable[[Mapping[str, Tensor]], Any]:
        @contextmanager
        def listening(reset: Mapping[str, Tensor]) -> Iterator[None]:
            before = weight.detach().clone()
            yield
            told[number].append((reset["t0"].clone(), (before != weight.detach()).any(1).nonzero().squeeze(1)))

        return listening

    stops = [torchrec.watch_evictions(module, listen(number)) for number in range(2)]
    for step in range(3):
        before, so_far = weight.detach().clone(), len(told[1])
        ids = torch.arange(20 * step, 20 * step + 20)
        module(KeyedJaggedTensor(["f0"], ids, lengths=torch.ones(20).int()))[0].wait()
        changed = (before != weight.detach()).any(1).nonzero().squeeze(1)
        [(rows, reset)] = told[1][so_far:]
        assert sorted(rows.tolist()) == reset.tolist() == changed.tolist()
        assert len(rows) == 20 or step
        if step == 0:
            stops[0]()
    stops[1]()
    assert (len(told[0]), len(told[1])) == (1, 3)
    assert "_evict" not in vars(module)
