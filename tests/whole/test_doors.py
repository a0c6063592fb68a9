"""The parts of access one by one: who a message is from, the guard's thread, and connections that are cut."""

from __future__ import annotations

import os
import socket
import stat
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from broker import access, guard
from broker.access import KeyDoor, KeyList, Line, Peer, UserDoor
from broker.guard import Guard
from mtplx import allowed
from mtplx.allowed import Allowed
from mtplx.errors import SettingsError
from mtplx.keys import BROKER, KeyPair, credentials, load_pair, make
from mtplx.settings import Settings

FRONT = "tcp://127.0.0.1:5999"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def allow(keys: Path, *entries: Allowed) -> None:
    allowed.change(keys, lambda listed: listed.update({one.key: one for one in entries}))


def told(**properties: str) -> access.Told:
    return lambda name: properties.get(name.strip("_").replace("-", "_"), "")


# --- ipc


@pytest.mark.parametrize(
    ("address", "owner"),
    [
        ("localhost:501:20:777", "uid:501"),
        ("localhost:501:20:", "uid:501"),
        ("localhost:0:0:1", "uid:0"),
        ("localhost:502:20:777", None),
        ("localhost:65534:65534:9", None),
        ("localhost", "uid:501"),
    ],
)
def test_on_ipc_the_os_user_counts_and_others_are_not_heard(address: str, owner: str | None) -> None:
    peer = UserDoor(501).who(b"\0abcd", told(Peer_Address=address))
    assert peer == (None if owner is None else Peer(owner, operator=True))


def test_connections_on_ipc_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MAX_CONNECTIONS", 3)
    door = UserDoor(501)
    for pid in range(10):
        assert door.who(b"\0abc%d" % pid, told(Peer_Address=f"localhost:501:20:{pid}")) is not None
    assert len(door._known) == 3


def test_a_routing_id_that_a_client_chose_says_nothing_of_the_user() -> None:
    door = UserDoor(501)
    assert door.who(b"me", told(Peer_Address="localhost:501:20:1")) is not None
    assert door.who(b"me", told(Peer_Address="localhost:502:20:2")) is None


def test_thousands_of_connections_that_came_and_went_take_little_memory() -> None:
    door = UserDoor(501)
    tracemalloc.start()
    try:
        for number in range(20_000):
            door.who(b"\0" + number.to_bytes(4), told(Peer_Address=f"localhost:501:20:{number}"))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 300 * 1024


def test_a_routing_id_that_begins_with_zero_may_be_a_client_s_own_as_well() -> None:
    door = UserDoor(501)
    assert door.who(b"\0mine", told(Peer_Address="localhost:501:20:1")) is not None
    assert access.named_by_itself(b"\0me")
    assert access.named_by_itself(b"\0mine too")
    assert not access.named_by_itself(b"\0\0\0\0\1")


# --- keys


def pair(keys: Path, name: str) -> KeyPair:
    return make(keys, name)


def test_a_key_is_heard_on_the_side_of_its_role_alone(state: Path) -> None:
    keys = state / "keys"
    pairs = {role: pair(keys, role) for role in allowed.ROLES}
    allow(keys, *(Allowed(role, role, one.public) for role, one in pairs.items()))
    listed = KeyList(keys)
    heard = {
        (side, role): KeyDoor(side, listed, lambda _: None).who(b"\0r", told(User_Id=one.public))
        for side in guard.SIDES
        for role, one in pairs.items()
    }
    assert {place for place, peer in heard.items() if peer is not None} == {
        ("front", "producer"),
        ("front", "operator"),
        ("back", "worker"),
    }
    assert heard["front", "operator"] == Peer(pairs["operator"].public, operator=True)
    assert heard["front", "producer"] == Peer(pairs["producer"].public, operator=False)


def test_a_message_without_a_key_is_from_nobody(state: Path) -> None:
    assert KeyDoor("front", KeyList(state), lambda _: None).who(b"\0r", told()) is None


def test_a_routing_id_stays_with_the_key_that_had_it_first(state: Path) -> None:
    first, second = pair(state / "keys", "first"), pair(state / "keys", "second")
    allow(state / "keys", *(Allowed("producer", f"k{i}", one.public) for i, one in enumerate((first, second))))
    door = KeyDoor("front", KeyList(state / "keys"), lambda _: None)
    assert door.who(b"\0r", told(User_Id=first.public)) is not None
    assert door.who(b"\0r", told(User_Id=second.public)) is None


def test_connections_that_ended_are_forgotten(state: Path) -> None:
    one = pair(state / "keys", "one")
    allow(state / "keys", Allowed("producer", "one", one.public))
    live = Line(7, ("10.0.0.1", 7))
    lines = {7: live}
    door = KeyDoor("front", KeyList(state / "keys"), lambda fd: lines.get(fd, Line(fd, ("10.0.0.2", fd))))
    for number in range(10 * access.PRUNE_FROM):
        # A new connection takes the descriptor of the one that ended.
        lines[8] = Line(8, ("10.0.0.3", number))
        door.who(b"\0%d" % number, told(User_Id=one.public, fd="7" if number == 0 else "8"))
    assert len(door._routes) <= 2 * access.PRUNE_FROM
    assert b"\x000" in door._routes


@pytest.mark.parametrize("change", ["content", "mode", "replaced", "gone"])
def test_every_change_of_the_list_is_seen(state: Path, change: str) -> None:
    keys = state / "keys"
    one = pair(keys, "one")
    allow(keys, Allowed("producer", "one", one.public))
    listed = KeyList(keys)
    listed.look()
    assert listed.changes == 0
    file = keys / "allowed"
    if change == "content":
        file.write_text(file.read_text().replace("producer", "operator"))
    elif change == "mode":
        file.chmod(0o622)
    elif change == "replaced":
        allowed.change(keys, dict.clear)
    else:
        file.unlink()
    listed.look()
    assert listed.changes == 1
    found = listed.find("front", one.public)
    assert (found and found.role) == ("operator" if change == "content" else None)


# --- the guard


@pytest.fixture
def guarded(state: Path) -> Iterator[tuple[Guard, zmq.Socket, zmq.Context, str]]:
    pair(state / "state" / "keys", BROKER)
    settings = Settings(front=FRONT, curve=True, run_dir=state)
    with zmq.Context() as context:
        watch = Guard(settings, context, Counter())
        with context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.handshake_ivl = 500
            watch.secure(router, "front")
            port = router.bind_to_random_port("tcp://127.0.0.1")
            yield watch, router, context, f"tcp://127.0.0.1:{port}"
        watch.close()


def dealer(context: zmq.Context, endpoint: str, server: KeyPair, own: KeyPair) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_serverkey, socket.curve_publickey = server.public.encode(), own.public.encode()
    socket.curve_secretkey = own.secret.encode()
    socket.connect(endpoint)
    socket.send(b"hi")
    return socket


def test_nobody_gets_in_where_the_thread_that_checks_keys_is_gone(state: Path, guarded) -> None:
    watch, router, context, endpoint = guarded
    keys = state / "state" / "keys"
    own = pair(keys, "one")
    allow(keys, Allowed("producer", "one", own.public))
    server = load_pair(keys / f"{BROKER}.key_secret")
    with dealer(context, endpoint, server, own):
        assert router.poll(10_000)
        router.recv_multipart()
    watch._thread.pipe.send(b"TERMINATE")
    watch._thread.thread.join(10)
    watch._thread.zap_socket.close(linger=0)
    with dealer(context, endpoint, server, own), dealer(context, endpoint, server, pair(keys, "stranger")):
        assert router.poll(1000) == 0
    with pytest.raises(RuntimeError, match="nobody can connect"):
        watch.revoked(0.0)


def test_a_connection_is_cut_only_while_its_descriptor_is_still_its_own(guarded) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        line = guard.line_of(peer.fileno())
        assert line is not None
        guard.shut(line._replace(address=("127.0.0.1", 1)))
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        guard.shut(line)
        assert client.recv(1) == b""
        peer.close()
        assert guard.line_of(line.descriptor) is None
        guard.shut(line)
        client.close()


@pytest.mark.parametrize("flag", ["front", "back"])
def test_tcp_beyond_the_machine_without_a_brokers_key_is_refused_with_the_command_to_run(state, flag) -> None:
    settings = Settings(run_dir=state, **{flag: "tcp://0.0.0.0:5999"})
    with zmq.Context() as context, pytest.raises(SettingsError) as caught:
        Guard(settings, context, Counter())
    assert f"--{flag} tcp://0.0.0.0:5999 leaves this machine" in str(caught.value)
    assert "mtplx keys new broker" in str(caught.value)


# --- files


def test_key_files_and_their_folders_are_private(state: Path) -> None:
    before = os.umask(0o002)
    try:
        make(state / "state" / "keys", "one")
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in state.rglob("*")}
    assert modes == {"state": 0o700, "keys": 0o700, "one.key": 0o600, "one.key_secret": 0o600}


def test_a_key_is_never_overwritten(state: Path) -> None:
    first = make(state / "keys", "one")
    with pytest.raises(SettingsError, match="exists"):
        make(state / "keys", "one")
    assert load_pair(state / "keys" / "one.key_secret") == first
    assert sorted(file.name for file in (state / "keys").iterdir()) == ["one.key", "one.key_secret"]


def test_the_secret_is_in_no_representation(state: Path) -> None:
    made = make(state / "keys", "one")
    assert made.secret not in repr(made)


def spoilt(file: Path, how: str) -> None:
    if how == "open to others":
        file.chmod(0o640)
    elif how == "a link":
        file.rename(file.with_suffix(".real"))
        file.symlink_to(file.with_suffix(".real"))
    elif how == "a pipe":
        file.unlink()
        os.mkfifo(file, 0o600)
    elif how == "a folder":
        file.unlink()
        file.mkdir()
    elif how == "empty":
        file.write_text("")
    elif how == "no text":
        file.write_bytes(bytes(range(256)))
    elif how == "a public key alone":
        file.write_text(file.with_suffix(".key").read_text())
    elif how == "halves of two pairs":
        other = make(file.parent, "other")
        file.write_text(f'curve\n public-key = "{other.public}"\n secret-key = "{load_pair_text(file)}"\n')
    else:
        file.unlink()


def load_pair_text(file: Path) -> str:
    return file.read_text().rpartition("secret-key = ")[2].strip().strip('"')


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("open to others", "chmod 600"),
        ("a link", "is a link"),
        ("a pipe", "no plain file"),
        ("a folder", "no plain file"),
        ("empty", "no key file"),
        ("no text", "key"),
        ("a public key alone", "no secret key"),
        ("halves of two pairs", "do not belong together"),
        ("missing", "mtplx keys new"),
    ],
)
def test_a_secret_key_file_that_is_not_right_is_refused_in_a_sentence(state: Path, how: str, words: str) -> None:
    make(state / "keys", "one")
    spoilt(state / "keys" / "one.key_secret", how)
    with pytest.raises(SettingsError, match=words):
        load_pair(state / "keys" / "one.key_secret")


@pytest.mark.parametrize("how", ["a link", "a pipe", "a folder"])
def test_a_list_that_is_no_plain_file_is_refused(state: Path, how: str) -> None:
    one = make(state / "keys", "one")
    allow(state / "keys", Allowed("producer", "one", one.public))
    spoilt(state / "keys" / "allowed", how)
    with pytest.raises(SettingsError, match="list of allowed keys"):
        allowed.read(state / "keys")


def test_a_key_folder_open_to_others_stops_the_broker(state: Path) -> None:
    make(state / "state" / "keys", BROKER)
    (state / "state" / "keys").chmod(0o750)
    with zmq.Context() as context, pytest.raises(SettingsError, match="open to others"):
        Guard(Settings(front=FRONT, curve=True, run_dir=state), context, Counter())


@pytest.mark.parametrize(
    "line",
    [
        "producer one",
        "king one {key}",
        "producer one {key} more",
        "producer one {key}\nproducer two {key}",
        "producer one short",
        "producer ../one {key}",
        "producer one " + 40 * "#",
        "producer one " + 40 * "~",
        "producer one {key}\n\0",
    ],
)
def test_a_line_that_is_none_is_named(state: Path, line: str) -> None:
    key = make(state / "keys", "one").public
    (state / "keys" / "allowed").write_text(line.format(key=key))
    with pytest.raises(SettingsError, match=r"Line \d"):
        allowed.read(state / "keys")


def test_changes_at_the_same_time_all_count(state: Path) -> None:
    entries = [Allowed("producer", f"k{n}", make(state / "keys", f"k{n}").public) for n in range(16)]
    threads = [threading.Thread(target=allow, args=(state / "keys", entry)) for entry in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(allowed.read(state / "keys").values()) == sorted(entries)


# --- what a connection shows


@pytest.mark.parametrize(
    "endpoint", ["tcp://gpu:5555", "tcp://10.0.0.7:5555", "tcp://[2001:db8::1]:5555", "tcp://127.0.0.2:1"]
)
def test_without_keys_nothing_leaves_the_machine(state: Path, endpoint: str) -> None:
    with pytest.raises(SettingsError, match=r"leaves this machine.*--server-key"):
        credentials(Settings(run_dir=state), endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://evil:1@127.0.0.1:5555",
        "tcp://127.0.0.1:5555;10.0.0.1:5555",
        "tcp://127.0.0.1:5555#x:1",
        "tcp://127.0.0.1:70000",
        "tcp://:5555",
        "tcp://127.0.0.1:5555/x",
    ],
)
def test_an_endpoint_that_libzmq_could_read_in_another_way_is_none(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="no port or no host"):
        Settings(front=endpoint)


@pytest.mark.parametrize(
    "endpoint", ["ipc:///tmp/x.sock", "tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://[::1]:5555"]
)
def test_on_this_machine_no_key_is_needed(state: Path, endpoint: str) -> None:
    assert credentials(Settings(run_dir=state), endpoint) is None
