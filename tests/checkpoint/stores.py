"""Save to, load from, and break object stores. Functions that ranks run."""

import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.checkpoint import read_folder
from lightning_overlap.storage import MARKER, place_at

from ..support.cases import TABLE_WISE, Batches
from ..support.fits import make_trainer
from ..support.saved import is_increment, manifest_of
from . import checkpoints
from .crashes import NUM_STEPS, ONE_TABLE, Left, Small, last_at, options_of
from .object_store import Objects, before_each_change, needing, store_in

RUN = "objects://bucket/run"


def fit(how: str, num_steps: int, *, resume: bool = False, address: str = RUN, **saving: Any) -> tuple[int, int]:
    """Save after every step; return the step that the fit began with, and the last one."""
    sgd = (torch.optim.SGD, {"lr": 0.5})
    strategy = OverlapEmbeddingStrategy(sharding="table_wise", fused_optimizer=sgd, **options_of(how))
    saving = {"save_last": True, "save_top_k": 1, **saving}
    saver = ModelCheckpoint(address, "{step}", every_n_train_steps=1, enable_version_counter=False, **saving)
    more: dict[str, Any] = {"callbacks": [saver], "max_steps": num_steps, "max_epochs": -1}
    trainer = make_trainer(strategy, enable_checkpointing=True, **more)
    torch.manual_seed(0)  # so that each fit has the same weights after a step
    model = Small()
    trainer.fit(model, datamodule=Batches(ONE_TABLE, NUM_STEPS), ckpt_path="last" if resume else None)
    return model.began, trainer.global_step


def step_of(address: str, sums: dict[int, set[float]]) -> int:
    """Read all of a checkpoint, which has to be whole; note the sum of its weights by step, and return the step."""
    manifest = manifest_of(address)
    for name in manifest.files:
        with manifest.checked(name):
            pass
    checkpoint = read_folder(address, weights_only=True)
    step, weights = int(checkpoint["global_step"]), checkpoint["state_dict"].values()
    sums.setdefault(step, set()).add(sum(float(tensor.double().sum()) for tensor in weights))
    return step


def names_in(address: str) -> list[str]:
    """Names of whole checkpoints."""
    return sorted(place_at(f"{address}/_").names_beside("", ".ckpt"))


def unlisted(address: str = RUN) -> list[str]:
    """Files in a folder of a store that no whole checkpoint has."""
    above, has = Objects._strip_protocol(address), set()
    for name in names_in(address):
        manifest, at = place_at(f"{address}/{name}").manifest(), f"{above}/{name}"
        has |= {at, f"{at}/{MARKER}"}  # of a full file, or of a folder
        for part in (None,) if manifest is None else (manifest, manifest.base):
            has |= set() if part is None else {f"{above}/{part.path(file)}" for file in part.files}
    return sorted({key for key in Objects()._keys() if key.startswith(f"{above}/")} - has)


def fit_and_crash(
    folder: str, how: str, num_resumed: int, num_steps: int = NUM_STEPS
) -> tuple[list[Left], list[str], dict[str, bool], list[str]]:
    """Fit, and look at what a crash before any change of the store would leave.

    Returns what is left; the names at the end; whether the first fits that went on from "last" did so at its step; the
    files at the end that no checkpoint has.
    """
    store, copies = Path(folder) / "store", Path(folder) / "copies"
    places: list[Path] = []
    copies.mkdir()

    def copy(*_: str) -> None:
        places.append(copies / str(len(places)))
        shutil.copytree(store, places[-1], copy_function=os.link)  # an object never changes

    with warnings.catch_warnings(action="ignore"):
        with store_in(store), before_each_change(copy):
            fit(how, num_steps)
        copy()
        sums: dict[int, set[float]] = {}
        left: dict[Any, Left] = {}
        began: dict[str, bool] = {}
        for copied in places:
            with store_in(copied):
                key = str(sorted((one.name, one.stat().st_ino) for one in copied.iterdir()))
                if key in left:
                    continue
                names = names_in(RUN)
                steps = {f"{RUN}/{name}": step_of(f"{RUN}/{name}", sums) for name in names}
                last = last_at(RUN)
                newest = max(steps.values(), default=0)
                left[key] = Left(0 if last is None else steps[last], newest, newest, names)
                kind = "" if last is None else f"{last} {len(names)}"
                if last is not None and kind not in began and len(began) < num_resumed:
                    resumed = steps[last] + 1
                    began[kind] = fit(how, resumed, resume=True) == (steps[last], resumed)
    assert all(len(of_step) == 1 for of_step in sums.values()), "parts of two checkpoints in one"
    with store_in(store):
        return list(left.values()), names_in(RUN), began, unlisted()


def fit_and_resume(folder: str, how: str) -> Any:
    with store_in(folder):
        options = options_of(how)
        whole = checkpoints.train(TABLE_WISE, f"{RUN}/one", epochs=2, **options)
        resumed = f"{RUN}/one/epoch=0.ckpt"
        assert is_increment(resumed) == (how == "incremental")
        again = checkpoints.train(TABLE_WISE, f"{RUN}/two", epochs=2, resume=resumed, **options)
    return whole.result, again.result


def fail_a_change(folder: str, rank: int, num: int, how: str) -> tuple[str, int]:
    """Let the store refuse a rank's `num`th put in a fit that saves; return the error, and the step of "last"."""
    puts = 0

    def refuse(what: str, path: str) -> None:
        nonlocal puts
        puts += what == "put" and dist.get_rank() == rank
        if puts == num:
            puts += 1
            raise PermissionError(f"{path}: this store has had enough")

    said, began = "", 0
    with store_in(folder):
        with before_each_change(refuse):
            try:
                fit(how, 3)
            except OSError as err:
                said = str(err)
        dist.barrier()
        began, _ = fit(how, 4, resume=True)
    return said, began


def change_the_format(folder: str, formats: Sequence[str]) -> list[str]:
    """Go on in one format after the other; at any change of the store its folders are whole. Return what is left."""

    def check(*_: str) -> None:
        for name in names_in(RUN):
            manifest = place_at(f"{RUN}/{name}").manifest()
            for file in () if manifest is None else manifest.files:
                manifest.check_size(file)

    best = {"save_top_k": 2, "monitor": "step", "mode": "max"}
    with warnings.catch_warnings(action="ignore"), store_in(folder), before_each_change(check):
        for number, how in enumerate(formats):
            first = 3 * number
            assert fit(how, first + 3, resume=number > 0, **best) == (first, first + 3)
        left = unlisted()
        assert not left, left
        return names_in(RUN)


def _fails(*args: Any, **kwargs: Any) -> str:
    try:
        fit(*args, **kwargs)
    except OSError as err:
        return str(err)
    return ""


def fit_with_keys(folder: str, how: str) -> list[str]:
    """Save to and load from a store that needs a key, given in fsspec's configuration or to one save.

    Returns what a fit without the key and one with another one say.
    """
    key, one = "the-key", f"{RUN}/one.ckpt"

    def configured(key: str) -> Any:
        return mock.patch.dict(fsspec.config.conf, {Objects.protocol: {"key": key}})

    with warnings.catch_warnings(action="ignore"), store_in(folder), needing(key):
        with configured(key):
            assert fit(how, 3) == (0, 3)
            assert fit(how, 4, resume=True) == (3, 4)
            dist.barrier()  # rank 0 removes what the other has not
            assert names_in(RUN) == ["last.ckpt", "step=4.ckpt"]
        assert checkpoints.save_to(one, {"key": key}, **options_of(how)) == "saved"
        with configured(key):
            assert checkpoints.load_from(TABLE_WISE, one) == "loaded"
        told = [checkpoints.load_from(TABLE_WISE, one), _fails(how, 5, resume=True)]
        with configured("another-key"):
            told.append(_fails(how, 5, resume=True))
            told.append(checkpoints.save_to(one, {"key": "a-third-key"}, **options_of(how)))
    return told


class OwnAddresses(TorchCheckpointIO):
    """Keeps `own://NAME` in a folder; fsspec knows no such addresses."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        assert storage_options in (None, "its own")
        super().save_checkpoint(checkpoint, str(path).replace("own:/", self.folder))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_checkpoint(str(path).replace("own:/", self.folder), *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(str(path).replace("own:/", self.folder))


def save_load_and_remove_elsewhere(folder: str) -> list[str]:
    """Go on from a full file at an address that only a plugin knows; return the first steps with the files there."""
    sgd, step = (torch.optim.SGD, {"lr": 0.5}), 2
    names: list[str] = []
    with warnings.catch_warnings(action="ignore"):
        for _ in range(2):
            model = Small()
            strategy = OverlapEmbeddingStrategy("base", fused_optimizer=sgd, checkpoint_format="full")
            options: dict[str, Any] = {"max_steps": step, "max_epochs": -1, "plugins": [OwnAddresses(folder)]}
            trainer = make_trainer(strategy, **options)
            path = "own://a.ckpt" if step > 2 else None
            trainer.fit(model, datamodule=Batches(ONE_TABLE, NUM_STEPS), ckpt_path=path)
            trainer.save_checkpoint("own://a.ckpt", storage_options="its own")
            names.append(f"{model.began} {sorted(os.listdir(folder))}")
            step += 1
        dist.barrier()
        trainer.strategy.remove_checkpoint("own://a.ckpt")
        dist.barrier()
    return [*names, str(os.listdir(folder))]


def resume_without_an_answer(folder: str) -> list[str]:
    """Go on from "last" and from a path while the store fails to say whether there is a marker."""
    with warnings.catch_warnings(action="ignore"), store_in(folder):
        fit("sharded", 2)
        with mock.patch.object(Objects, "unknown", "checksums.json"):
            return [_fails("sharded", 3, resume=True), checkpoints.load_from(TABLE_WISE, f"{RUN}/last.ckpt")]


def refuse_removals(folder: str) -> list[str]:
    """Let the store refuse every removal; return what warnings say."""

    def refuse(what: str, path: str) -> None:
        if what == "remove":
            raise PermissionError(path)

    with store_in(folder), before_each_change(refuse), warnings.catch_warnings(record=True, action="always") as caught:
        fit("sharded", 3)
    return [str(one.message) for one in caught if "old files" in str(one.message)]


def copy_by_hand(folder: Path, how: str, address: str) -> None:
    """Download a folder of checkpoints, and upload one of a disk; each copy has to be read and to be gone on from."""
    down, local, up = folder / "down", folder / "local", f"{address}/up"
    sums: dict[int, set[float]] = {}

    def read_all(at: str, names: list[str]) -> None:
        assert names == ["last.ckpt", *(f"step={step}.ckpt" for step in range(1, 5))]
        assert [step_of(f"{at}/{name}", sums) for name in names] == [4, 1, 2, 3, 4]

    with warnings.catch_warnings(action="ignore"), store_in(folder / "store"):
        fit(how, 4, address=address, save_top_k=-1)
        read_all(address, names_in(address))
        above = Objects._strip_protocol(address)
        for key in Objects()._keys():
            file = down / key.removeprefix(f"{above}/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(Objects().cat_file(key))
        fit(how, 4, address=str(local), save_top_k=-1)
        for file in local.rglob("*"):
            if file.is_file():
                Objects().put_object(f"{Objects._strip_protocol(up)}/{file.relative_to(local)}", file.read_bytes())
        for at, names in ((str(down), sorted(path.name for path in down.glob("*.ckpt"))), (up, names_in(up))):
            read_all(at, names)
            assert fit(how, 5, address=at, resume=True) == (4, 5)
            assert is_increment(f"{at}/step=2.ckpt") == (how == "incremental")
        assert not unlisted(up)
        for step in range(1, 5):
            place_at(f"{up}/step={step}.ckpt").discard()
        assert names_in(up) == ["last.ckpt", "step=5.ckpt"]
        assert not unlisted(up)
    assert all(len(of_step) == 1 for of_step in sums.values())
