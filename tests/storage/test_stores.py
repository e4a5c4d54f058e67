"""Stores: what is put is there, whole, under its name; what cannot be is told in one sentence."""

import pickle
import sys
import traceback
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock
from urllib.parse import quote, quote_plus

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from lightning_overlap.storage import (
    DiskStore,
    ObjectStore,
    RedisStore,
    Store,
    StoreError,
    check_store,
    close_store,
    is_unfinished,
    joined,
    put_file,
    store_at,
)
from lightning_overlap.storage.store import Words
from lightning_overlap.text import message_without_secrets, without_secrets

NAMES = [f"{step:02}-{rank}.arrow" for step in (2, 10) for rank in (0, 1)]


def test_files_are_there_until_they_are_removed(store: Store) -> None:
    check_store(store)
    assert list(store.names()) == []
    if isinstance(store, DiskStore):
        assert list(store.folder.iterdir()) == []
    for name in reversed(NAMES):
        store.put(name, [name.encode()])
    store.put(NAMES[0], [b"anew", memoryview(b"\0\xff")] * 1000)
    assert sorted(store.names()) == NAMES
    assert store.read(NAMES[0]) == b"anew\0\xff" * 1000
    assert store.read(NAMES[1]) == NAMES[1].encode()
    store.remove([NAMES[2], "not there", NAMES[0]])
    assert sorted(store.names()) == [NAMES[1], NAMES[3]]
    with pytest.raises(FileNotFoundError, match=NAMES[0]):
        store.read(NAMES[0])


def test_a_store_is_copied_before_and_after_its_first_use(store: Store) -> None:
    deepcopy(store).put(NAMES[0], [b"0"])
    store.put(NAMES[1], [b"1"])
    for copied in (pickle.loads(pickle.dumps(store)), deepcopy(store)):
        assert sorted(copied.names()) == NAMES[:2]
        close_store(copied)
        assert copied.read(NAMES[1]) == b"1"


def test_a_key_of_another_kind_is_told(redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        client.set("taken", "x")
    with pytest.raises(StoreError, match=r"cannot write to the stream 'taken' .*WRONGTYPE"):
        check_store(RedisStore(redis_url, key="taken"))


def test_a_folder_that_cannot_be_written_or_opened_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = DiskStore(tmp_path / "file" / "deltas")
    said = r"cannot write to '.*file/deltas': .*Choose a"
    for use in (lambda: check_store(store), lambda: store.put(NAMES[0], [b""])):
        with pytest.raises(StoreError, match=said):
            use()
    with pytest.raises(ValueError, match=r"cannot open nosuch://x/y: .*nosuch"):
        ObjectStore("nosuch://x/y")


def test_a_server_that_is_not_there_is_told_without_its_password() -> None:
    store = RedisStore("redis://me:secret@127.0.0.1:1/0?key=mine")
    for use in (lambda: check_store(store), store.names, lambda: store.put(NAMES[0], [b""])):
        with pytest.raises(StoreError, match=r"'mine' at redis://me:\*\*\*@127.0.0.1:1/0: ") as err:
            use()
        assert "secret" not in str(err.value)
    assert "secret" not in repr(store)


MARK = "Zq9"  # a secret consists of it and anything else
_ANY = st.text(st.sampled_from("@/:?#&=%+ '\"[]-a1"), max_size=4)
_SECRETS = st.builds(lambda *parts: MARK.join(parts), _ANY, _ANY, _ANY)


@given(st.sampled_from(["redis", "rediss", "unix", "nosuch"]), st.sampled_from(["", "me", "a@b"]), _SECRETS)
def test_a_password_never_shows_whatever_it_has(scheme: str, user: str, password: str) -> None:
    address = f"{scheme}://{user}:{password}@127.0.0.1:1/0"
    assert MARK not in without_secrets(address)
    assert MARK not in message_without_secrets(f"cannot reach {address}: {password} is wrong", address)
    said = []
    try:
        said.append(repr(store_at(address)))
    except ValueError as err:
        said += traceback.format_exception(err)
    assert said
    assert MARK not in "".join(line for line in said if "address = " not in line)


@given(_SECRETS.filter(bool), st.sampled_from([OSError, PermissionError, FileNotFoundError, RuntimeError, ValueError]))
def test_no_error_of_a_store_has_a_secret(secret: str, kind: type[Exception]) -> None:
    """In whatever part of an error it is: the address's password, or an option."""
    words = Words("the store", f"s3://me:{secret}@host/x", "Try again.", {"client": {"secret_key": secret}})
    causes = [kind(f"{secret} is wrong"), kind(f"s3://me:{secret}@host/x is wrong")]
    causes += [kind(5, f"{secret} is wrong", f"/x/{secret}")] if issubclass(kind, OSError) else []
    for cause in causes:
        expected = kind if kind is not RuntimeError else StoreError
        with pytest.raises(expected) as caught, words.errors("read", keeps=(ValueError,)):
            raise cause
        assert MARK not in str(caught.value)
        assert caught.value.__cause__ is None


def test_the_reason_of_an_error_stays_if_only_an_option_is_secret() -> None:
    words = Words("the store", "s3://host/x", "Try again.", {"secret": "abc"})
    said = r"cannot read a of the store: ValueError: Invalid bucket name\. Try again\."
    with pytest.raises(StoreError, match=said), words.errors("read", "a"):
        raise ValueError("Invalid bucket name")


@given(
    st.sampled_from(["sig", "SIG", "token", "sas_token", "X-Amz-Signature", "password", "account_key", "accessKeyId"]),
    _SECRETS.filter(lambda one: "&" not in one),
)
def test_a_secret_option_never_shows(name: str, secret: str) -> None:
    address = f"https://account.blob.core.windows.net/a/deltas?sv=2024&{name}={secret}&se=2027"
    assert MARK not in without_secrets(address)
    assert without_secrets(address).startswith("https://account.blob.core.windows.net/a/deltas?sv=2024&")
    for quoted in (quote(secret, safe=""), quote_plus(secret)):
        text = f"cannot GET {address.replace(secret, quoted)}: 403, sig=x&{name}={quoted}"
        assert MARK not in message_without_secrets(text)
    assert MARK not in repr(RedisStore(f"redis://host/0?{name}={quote(secret, safe='')}"))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("deltas", "DiskStore('deltas')"),
        ("file:///a/deltas", "DiskStore('/a/deltas')"),
        ("memory://x", "ObjectStore('memory://x')"),
        ("redis://:pw@host:1/2?key=k", "RedisStore('redis://:***@host:1/2', key='k')"),
        ("rediss://host/0", "RedisStore('rediss://host/0', key='embedding_deltas')"),
        ("unix:///run/redis.sock?db=1&key=k", "RedisStore('unix:///run/redis.sock?db=1', key='k')"),
    ],
)
def test_a_store_by_its_address(address: Any, expected: str) -> None:
    assert repr(store_at(address)) == expected


def test_a_package_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"{}, which cannot be imported \(.*\): pip install 'lightning_overlap\[deltas\]'"
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=said.format("RedisStore needs the package redis")):
        store_at("redis://host/0")


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = DiskStore("sent")
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    store.put(NAMES[0], [b"file"])
    assert [path.name for path in (tmp_path / "sent").iterdir()] == NAMES[:1]


def test_a_file_that_is_not_written_to_its_end_is_not_there(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"a part"
        raise KeyError("the rest")

    DiskStore(tmp_path).put(NAMES[0], [b"former"])
    with pytest.raises(StoreError, match="KeyError: 'the rest'"):
        DiskStore(tmp_path).put(NAMES[0], pieces())  # type: ignore[arg-type]
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {NAMES[0]: b"former"}


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_pieces_are_joined(pieces: list[bytes]) -> None:
    assert joined([memoryview(one) if number % 2 else one for number, one in enumerate(pieces)]) == b"".join(pieces)


def test_a_file_system_without_whole_puts_gets_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As fsspec's local one: a put that is killed leaves the former file, and another name beside it."""
    store = ObjectStore(f"file://{tmp_path}")
    store.put("a/b", [b"former"])
    with monkeypatch.context() as killed:
        killed.setattr(type(store._files), "mv", Mock(side_effect=KeyboardInterrupt))
        killed.setattr(type(store._files), "rm_file", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.put("a/b", [b"new"])
    assert store.read("a/b") == b"former"
    [left] = set(store.names("a")) - {"b"}
    assert is_unfinished(left)
    store.put("a/b", [b"new"])
    assert store.read("a/b") == b"new"


class RenamesToNewNames(MemoryFileSystem):
    """Renames, and not over a file, as some file systems do; fsspec's own `mv` copies."""

    protocol = "renames"
    store: ClassVar[dict[str, Any]] = {}

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.exists(path2):
            raise FileExistsError(path2)
        self.cp_file(path1, path2)
        self.rm_file(path1)


def test_a_file_system_that_renames_to_new_names_only(tmp_path: Path) -> None:
    fsspec.register_implementation("renames", RenamesToNewNames, clobber=True)
    store = ObjectStore("renames://run[1]/*")  # a pattern, elsewhere
    check_store(store)
    for content in (b"former", b"new"):
        store.put("a", [content])
        assert store.read("a") == content
    assert store.names() == ["a"]


def test_a_file_at_an_exact_address(tmp_path: Path) -> None:
    put_file(f"simplecache::file://{tmp_path}/a.ckpt", b"whole")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("a.ckpt", b"whole")]
    with pytest.raises(StoreError, match=r"cannot write to nosuch://x: ValueError"):
        put_file("nosuch://x", b"")


def test_what_is_missing_or_refused_is_an_error_of_the_store(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    with pytest.raises(StoreError, match=r"^cannot read a of '.*': No such file or directory: '.*/a'$") as err:
        store.read("a")
    assert isinstance(err.value, FileNotFoundError)
    with pytest.raises(PermissionError), store._words.errors("write to"):
        raise PermissionError(13, "Permission denied")
