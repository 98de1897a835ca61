"""Ways out of a sandbox: each must fail, and each is shown to work where there is no sandbox.

The attempts are in support/attempts.py. What they say is not believed: the tests look at the file, the
process or the socket that was to be reached. Everything goes through a real server's `process/start`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support import attempts
from support.rpc import PATH, Record, WebSocketPeer
from support.sandbox import FORBIDDING, entry, profile, read_only, run_in, start_in, workspace_write
from support.server import COMMAND, RunningServer
from support.wait import eventually

pytestmark = pytest.mark.usefixtures("needs_bubblewrap")

PROGRAM = attempts.__file__
PYTHON = [sys.executable, "-I", "-S", PROGRAM]


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str], WebSocketPeer]]:
    """Connections to a server with bubblewrap, and to one that may make no user namespaces."""
    with ExitStack() as stack:
        opened: dict[str, WebSocketPeer] = {}

        def get(backend: str) -> WebSocketPeer:
            if backend not in opened:
                command = (COMMAND,) if backend == "bubblewrap" else (*FORBIDDING, COMMAND)
                server = stack.enter_context(RunningServer(command=command))
                peer = stack.enter_context(WebSocketPeer(server.url, server.pid))
                peer.initialize()
                opened[backend] = peer
            return opened[backend]

        yield get


@pytest.fixture(params=["bubblewrap", "landlock"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def peer(servers: Callable[[str], WebSocketPeer], backend: str) -> WebSocketPeer:
    return servers(backend)


class Place:
    """A workspace, and next to it a file that nobody in a sandbox may touch."""

    def __init__(self, folder: Path) -> None:
        self.workspace = folder / "workspace"
        self.workspace.mkdir(parents=True)
        (folder / "outside").mkdir()
        self.target = folder / "outside" / "target"
        self.target.write_text("original")
        self.target.chmod(0o600)
        self.before = self.state()

    def state(self) -> Any:
        """Everything an attempt could change."""
        folder = self.target.parent
        files = {}
        for path in sorted(folder.iterdir()):
            info = path.lstat()
            files[path.name] = (path.read_bytes(), info.st_mode, info.st_nlink, info.st_mtime_ns, info.st_uid)
        return files

    def sandbox(self, backend: str) -> dict[str, Any]:
        """Everything can be read, the workspace written. For Landlock nothing in it is protected."""
        names = (".git", ".agents", ".codex", ".aws")
        more = [entry(self.workspace / name, "write") for name in names] if backend == "landlock" else []
        return workspace_write(self.workspace, more=more)


def attempt(peer: WebSocketPeer, sandbox: dict[str, Any] | None, *words: object, **more: Any) -> Record:
    env = {"FREE": "1"} if sandbox is None else {}
    return run_in(peer, sandbox, *PYTHON, *map(str, words), env=env, **more)


def escaped(record: Record) -> bool:
    """What the attempt believes. Anything but its two answers is a broken test."""
    said = record.output.decode()
    assert "Traceback" not in said, said
    assert (record.exit_code, said[:5]) in ((0, "escap"), (1, "held:")), (record.exit_code, said)
    return record.exit_code == 0


# Files -------------------------------------------------------------------------------------------

FILES = [
    "symlink",
    "hard_link",
    "rename_out",
    "rename_in",
    "exchange",
    "truncate",
    "change_mode",
    "change_times",
    "proc_root",
    "proc_cwd",
    "user_namespace",
]


@pytest.mark.parametrize("name", FILES)
def test_files_outside(peer: WebSocketPeer, backend: str, name: str, tmp_path: Path) -> None:
    free, caught = Place(tmp_path / "free"), Place(tmp_path / "caught")
    assert escaped(attempt(peer, None, name, free.workspace, free.target))
    assert free.state() != free.before, "without a sandbox it can be done"

    assert not escaped(attempt(peer, caught.sandbox(backend), name, caught.workspace, caught.target))
    assert caught.state() == caught.before


def test_mounting(peer: WebSocketPeer, backend: str, tmp_path: Path) -> None:
    place = Place(tmp_path)
    if backend == "bubblewrap":  # the other server's processes may not even try
        assert escaped(attempt(peer, None, "mounting", place.workspace, place.target))
    sandbox = place.sandbox(backend)
    record = attempt(peer, sandbox, "mounting", place.workspace, place.target)
    # Whoever may make a user namespace may mount in there; it must not get anywhere by that.
    assert not escaped(record) or backend == "bubblewrap"
    assert place.state() == place.before


def test_core_dump(peer: WebSocketPeer, backend: str, tmp_path: Path) -> None:
    if Path("/proc/sys/kernel/core_pattern").read_text()[0] in "|/":
        pytest.skip("cores of this machine do not go to the directory of whoever crashed")
    free, caught = Place(tmp_path / "free"), Place(tmp_path / "caught")
    assert escaped(attempt(peer, None, "core_dump", free.workspace, free.target))
    assert free.state() != free.before
    assert not escaped(attempt(peer, caught.sandbox(backend), "core_dump", caught.workspace, caught.target))
    assert caught.state() == caught.before


def test_a_link_turned_while_it_is_followed(peer: WebSocketPeer, backend: str, tmp_path: Path) -> None:
    """One process turns a name between a file of its own and a link outside, another keeps writing to it."""
    place = Place(tmp_path)
    script = f"""
        import os, signal, time
        name, link, target = "name", "link", {str(place.target)!r}
        if os.path.lexists(link):
            os.unlink(link)  # of a run before, which was interrupted
        child = os.fork()
        while child == 0:
            os.symlink(target, link); os.rename(link, name)
            open(link, "w").close(); os.rename(link, name)
        mine = outside = 0
        deadline = time.monotonic() + 15
        while (mine < 50 or outside < 50) and time.monotonic() < deadline:
            try:
                fd = os.open(name, os.O_WRONLY)
                os.write(fd, b"escaped")
                theirs = os.path.samestat(os.fstat(fd), os.stat(target))
                os.close(fd)
            except FileNotFoundError:
                continue
            except OSError:
                theirs = True
            mine, outside = mine + (not theirs), outside + theirs
        os.kill(child, signal.SIGKILL)
        print(mine, outside)
    """
    (place.workspace / "race.py").write_text("\n".join(line[8:] for line in script.splitlines()))
    cwd = f"file://{place.workspace}"
    command = [sys.executable, "-I", "-S", "race.py"]
    record = run_in(peer, place.sandbox(backend), *command, cwd=cwd)
    assert min(map(int, record.stdout.split())) >= 50, (record.stdout, record.stderr)
    assert place.state() == place.before

    assert run_in(peer, None, *command, cwd=cwd).exit_code == 0
    assert place.state() != place.before


@pytest.mark.parametrize("name", [".git", ".agents", ".codex", ".aws"])
def test_protected_directory_that_did_not_exist(
    servers: Callable[[str], WebSocketPeer], name: str, tmp_path: Path
) -> None:
    peer = servers("bubblewrap")
    free, caught = Place(tmp_path / "free"), Place(tmp_path / "caught")
    assert escaped(attempt(peer, None, "protected", free.workspace, name))

    assert not escaped(attempt(peer, workspace_write(caught.workspace), "protected", caught.workspace, name))
    assert not os.path.lexists(caught.workspace / name), "nothing is left of it"
    assert caught.workspace.is_dir()


def test_a_directory_above_a_workspace_inside_of_another(
    servers: Callable[[str], WebSocketPeer], tmp_path: Path
) -> None:
    """Rename what a writable root lies in, and make another tree in its place."""
    peer = servers("bubblewrap")
    free, caught = Place(tmp_path / "free"), Place(tmp_path / "caught")
    for place, sandboxed in ((free, False), (caught, True)):
        inner = place.workspace / "a" / "b"
        inner.mkdir(parents=True)
        sandbox = workspace_write(inner, more=[entry(place.workspace, "write")]) if sandboxed else None
        script = f"mv {place.workspace}/a {place.workspace}/x; mkdir -p {inner}/.git/hooks; touch {inner}/y"
        run_in(peer, sandbox, "/bin/sh", "-c", script)
        assert (inner / "y").exists()
        assert (inner / ".git").exists() != sandboxed
        assert (place.workspace / "x").exists() != sandboxed


def test_a_workspace_that_is_made_inside_of_another(
    servers: Callable[[str], WebSocketPeer], tmp_path: Path
) -> None:
    """It was to be protected, and is not there: then nobody inside makes it, and what is in it."""
    peer = servers("bubblewrap")
    place = Place(tmp_path)
    later = place.workspace / "later" / "root"
    sandbox = workspace_write(place.workspace, more=[entry(later, "write")])
    script = f"cd {place.workspace}; mkdir -p later/root/.git; mkdir n; mv -T n later"
    assert run_in(peer, sandbox, "/bin/sh", "-c", script).exit_code != 0
    assert os.listdir(place.workspace) == ["n"]


def test_a_link_to_a_workspace_inside_of_another(
    servers: Callable[[str], WebSocketPeer], tmp_path: Path
) -> None:
    """Turn the link to a tree of one's own: by its name the workspace has a .git then."""
    peer = servers("bubblewrap")
    place = Place(tmp_path)
    (place.workspace / "real").mkdir()
    link = place.workspace / "link"
    link.symlink_to("real")
    sandbox = workspace_write(link, more=[entry(place.workspace, "write")])
    script = f"cd {place.workspace}; mkdir -p evil/.git; ln -sfn evil link"
    record = run_in(peer, sandbox, "/bin/sh", "-c", script)
    assert b"it crosses writable symlink" in record.stderr
    assert not (link / ".git").exists()
    assert os.readlink(link) == "real"


def test_a_workspace_whose_mode_forbids_what_its_owner_may_change(
    servers: Callable[[str], WebSocketPeer], tmp_path: Path
) -> None:
    peer = servers("bubblewrap")
    place = Place(tmp_path)
    place.workspace.chmod(0o555)
    script = f"chmod 755 {place.workspace}; mkdir {place.workspace}/.git"
    record = run_in(peer, workspace_write(place.workspace), "/bin/sh", "-c", script)
    assert record.exit_code != 0
    assert not os.path.lexists(place.workspace / ".git")
    place.workspace.chmod(0o755)


def test_landlock_refuses_what_it_cannot_protect(
    servers: Callable[[str], WebSocketPeer], tmp_path: Path
) -> None:
    """A workspace whose `.git` must stay as it is: refused, not weakened."""
    peer = servers("landlock")
    place = Place(tmp_path)
    params = {**peer.start_params(["touch", "x"]), "sandbox": workspace_write(place.workspace)}
    code, message = peer.refused("process/start", params)
    assert code == -32602
    assert message.startswith("failed to prepare process sandbox: Landlock cannot take away")
    assert "this needs bubblewrap" in message
    sandbox = profile([entry(":root", "read"), entry(place.target, "deny")])
    assert peer.refused("process/start", {**peer.start_params(["cat", "x"]), "sandbox": sandbox})[0] == -32602


# Other processes ---------------------------------------------------------------------------------

VICTIM = """
import ctypes, os, signal, sys
buffer, heard = ctypes.create_string_buffer(b"original", 8), []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
print(os.getpid(), ctypes.addressof(buffer), flush=True)
for _ in iter(sys.stdin.readline, ""):
    print(buffer.raw, len(heard), flush=True)
"""


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[str]]:
    """A process outside, which tells what is in its memory and how often it was signalled."""
    started = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with started:
        yield started
        started.kill()


@pytest.mark.parametrize("name", ["memory", "process_vm", "ptrace", "kill", "steal_descriptor"])
def test_processes_outside(
    peer: WebSocketPeer, backend: str, name: str, victim: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert victim.stdin is not None
    assert victim.stdout is not None

    def state() -> str:
        assert victim.stdin is not None
        assert victim.stdout is not None
        print(file=victim.stdin, flush=True)
        return victim.stdout.readline()

    pid, address = victim.stdout.readline().split()
    before = state()
    assert not escaped(attempt(peer, Place(tmp_path).sandbox(backend), name, pid, address))
    # With a network there is no filter against it; then namespaces and Landlock alone must do.
    with_network = profile([entry(":root", "read")], network=True)
    assert not escaped(attempt(peer, with_network, name, pid, address))
    assert state() == before

    assert escaped(attempt(peer, None, name, pid, address))
    if name not in ("ptrace", "steal_descriptor"):
        assert state() != before


# The kernel --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["io_uring", "netlink", "packet", "kernel_settings", "kernel_settings_again"]
)
def test_the_kernel(peer: WebSocketPeer, name: str) -> None:
    free = escaped(attempt(peer, None, name))
    assert free or os.geteuid() != 0  # most of it only root can do at all
    assert not escaped(attempt(peer, read_only(), name))


def test_new_file_systems(peer: WebSocketPeer, backend: str, tmp_path: Path) -> None:
    """Whoever can mount gets at the host's groups of processes: their limits, and the others in them."""
    place = Place(tmp_path)
    free = escaped(attempt(peer, None, "new_file_system", place.workspace))
    assert free or os.geteuid() != 0
    for sandbox in (read_only(), read_only(network=True), place.sandbox(backend)):
        assert not escaped(attempt(peer, sandbox, "new_file_system", place.workspace))


def test_a_directory_that_a_pattern_begins_with(
    servers: Callable[[str], WebSocketPeer], tmp_path: Path
) -> None:
    """Rename it, and the next time the pattern fits nothing."""
    peer = servers("bubblewrap")
    place = Place(tmp_path)
    keys = place.workspace / "conf" / "keys"
    keys.mkdir(parents=True)
    (keys / "a.key").write_text("secret")
    sandbox = workspace_write(place.workspace, more=[entry(f"{place.workspace}/conf/**/*.key", "deny")])
    for argv in (["mv", "conf", "other"], ["mv", "conf/keys", "keys"]):
        run_in(peer, sandbox, *argv, cwd=place.workspace.as_uri())
    script = "cat conf/*/*.key other/*/*.key keys/*.key"
    assert b"secret" not in run_in(peer, sandbox, "sh", "-c", script, cwd=place.workspace.as_uri()).output
    assert (place.workspace / "conf").is_dir()


@pytest.mark.parametrize("target", [".git", ".git/hooks", "keep"])
def test_a_directory_for_temporary_files_that_is_turned(
    servers: Callable[[str], WebSocketPeer], tmp_path: Path, target: str
) -> None:
    """One command makes TMPDIR a link to what is protected, the next one has that TMPDIR."""
    peer = servers("bubblewrap")
    project, other = tmp_path / "project", tmp_path / "other"
    for folder in (project / ".git/hooks", project / "keep", other):
        folder.mkdir(parents=True)
    box = profile(
        [
            entry(":root", "read"),
            entry(project, "write"),
            entry(project / "keep", "read"),
            entry(other, "write"),
            entry(":tmpdir", "write"),
        ]
    )
    turn = ("ln", "-s", str(project / target), str(other / "t"))
    assert run_in(peer, box, *turn, env={"PATH": PATH, "TMPDIR": "/nonexistent"}).exit_code == 0
    write = ("touch", str(project / target / "escaped"))
    assert run_in(peer, box, *write, env={"PATH": PATH, "TMPDIR": str(other / "t")}).exit_code != 0
    assert not (project / target / "escaped").exists()


SWAP = """\
import ctypes, os, sys, time
os.chdir(sys.argv[1])
print("up", flush=True)
libc = ctypes.CDLL(None)
while not os.path.exists("stop"):
    libc.renameat2(-100, b"mine", -100, b"link", 2)
    time.sleep(0.0005)
"""


def test_a_directory_that_is_turned_all_the_time(
    servers: Callable[[str], WebSocketPeer], tmp_path: Path
) -> None:
    """One command exchanges another one's TMPDIR for a link, again and again, while that is being started."""
    peer = servers("bubblewrap")
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    for folder in (shared / "mine", victim):
        folder.mkdir(parents=True)
    (shared / "link").symlink_to("../victim")
    box = profile([entry(":root", "read"), entry(shared, "write"), entry(":tmpdir", "write")])
    swapping = start_in(peer, box, "python3", "-c", SWAP, str(shared), env={"PATH": PATH})
    peer.saw(swapping, b"up")
    env = {"PATH": PATH, "TMPDIR": str(shared / "mine")}
    for _ in range(60):
        run_in(peer, box, "touch", str(victim / "escaped"), env=env)
        assert not (victim / "escaped").exists()
    (shared / "stop").touch()
    peer.finished(swapping)


def test_a_repository_behind_a_worktree(servers: Callable[[str], WebSocketPeer], tmp_path: Path) -> None:
    """What `.git` leads to names in turn where hooks and settings are; or it is not there yet."""
    peer = servers("bubblewrap")
    common, missing = Place(tmp_path / "common"), Place(tmp_path / "missing")
    store = common.workspace / "store"
    (store / "worktrees" / "x").mkdir(parents=True)
    (store / "config").write_text("")
    (store / "worktrees" / "x" / "commondir").write_text("../..\n")
    (common.workspace / ".git").write_text("gitdir: store/worktrees/x\n")
    (missing.workspace / ".git").write_text("gitdir: store\n")
    words = (
        "sh",
        "-c",
        "mkdir -p store/hooks; echo escaped >> store/config; echo x > store/hooks/pre-commit",
    )
    for place in (common, missing):
        run_in(peer, place.sandbox("bubblewrap"), *words, cwd=place.workspace.as_uri())
    assert sorted(path.name for path in store.iterdir()) == ["config", "worktrees"]
    assert (store / "config").read_text() == ""
    assert sorted(path.name for path in missing.workspace.iterdir()) == [".git"]


def test_what_stays_closed_with_a_network(peer: WebSocketPeer) -> None:
    for name in ("io_uring", "vsock"):
        assert not escaped(attempt(peer, read_only(network=True), name))


def test_disks(peer: WebSocketPeer, tmp_path: Path) -> None:
    if not escaped(attempt(peer, None, "device", tmp_path, tmp_path)):
        pytest.skip("whoever runs these tests cannot open a disk either")
    assert not escaped(attempt(peer, read_only(), "device", tmp_path, tmp_path))


def test_sockets_outside(peer: WebSocketPeer, backend: str, tmp_path: Path) -> None:
    """An abstract socket, a port, and a socket in the workspace that hands out a file of outside."""
    place = Place(tmp_path)
    name = f"exec-server-escape-{os.getpid()}-{backend}"
    path = place.workspace / "socket"
    with ExitStack() as stack:
        listening = [stack.enter_context(socket.socket(family)) for family in (1, 2, 1)]
        listening[0].bind("\0" + name)
        listening[1].bind(("127.0.0.1", 0))
        os.chdir(place.workspace)  # the name of a socket is short
        listening[2].bind("socket")
        file = stack.enter_context(place.target.open("r+b"))
        for server in listening:
            server.listen()

        def answer(server: socket.socket) -> None:
            connection, _ = server.accept()
            with connection:
                if server is listening[2]:
                    socket.send_fds(connection, [b"!"], [file.fileno()])
                else:
                    connection.send(b"reached")

        asked = [
            ("abstract_socket", name, listening[0]),
            ("tcp", listening[1].getsockname()[1], listening[1]),
            ("descriptor_passed", path, listening[2]),
        ]
        for what, where, server in asked:
            assert not escaped(attempt(peer, place.sandbox(backend), what, where))
            server.settimeout(0)
            with pytest.raises(BlockingIOError):
                server.accept()
            server.settimeout(None)
        assert place.state() == place.before
        for what, where, server in asked:
            thread = threading.Thread(target=answer, args=(server,))
            thread.start()
            assert escaped(attempt(peer, None, what, where))
            thread.join()
        assert place.state() != place.before


@pytest.mark.parametrize("name", ["datagram", "datagram_raw", "datagram_by_pair"])
def test_datagrams_to_named_sockets(peer: WebSocketPeer, backend: str, name: str, tmp_path: Path) -> None:
    """A system log, or a service manager, takes orders from whoever sends them."""
    place = Place(tmp_path)
    os.chdir(tmp_path)  # the name of a socket is short
    cwd = f"file://{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind("log")
        log.settimeout(0)
        assert not escaped(attempt(peer, place.sandbox(backend), name, "log", cwd=cwd))
        with pytest.raises(BlockingIOError):
            log.recv(100)
        assert escaped(attempt(peer, None, name, "log", cwd=cwd))
        assert log.recv(100) == b"escaped"


def test_the_server_itself(tmp_path: Path, servers: Callable[[str], WebSocketPeer]) -> None:
    """With a network, a command could ask the server that keeps it in a sandbox for one outside."""
    del servers
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the name of a socket is short
        path = f"{folder}/socket"
        with (
            RunningServer(listen=f"unix://{path}") as server,
            WebSocketPeer(server.url, server.pid) as peer,
        ):
            peer.initialize()
            assert escaped(attempt(peer, None, "own_server", path))
            writing = [entry(":root", "read"), entry(folder, "write")]
            for sandbox in (read_only(network=True), profile(writing, network=True), profile(writing)):
                assert not escaped(attempt(peer, sandbox, "own_server", path))
            peer.refused("fs/remove", {"path": f"file://{path}", "sandbox": profile(writing)})
            assert os.path.exists(path)


# Mounts ------------------------------------------------------------------------------------------

SHARED = 'mount --make-rshared / && exec "$0" "$@"'
"""As it is where systemd runs. In a mount namespace of its own: this machine's mounts stay as they are."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_what_is_mounted_later(tmp_path: Path) -> None:
    """It must not appear inside: neither to commands nor to warm helpers of file calls."""
    place = Place(tmp_path)
    later = tmp_path / "later"
    later.mkdir()
    command = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", SHARED, COMMAND]
    with RunningServer(command=command) as server, WebSocketPeer(server.url, server.pid) as peer:
        inside = ["nsenter", "--mount", f"--target={server.pid}"]
        peer.initialize()
        script = f"echo up; read go; touch {later}/made && echo escaped"
        running = [
            start_in(peer, sandbox, "/bin/sh", "-c", script, pipeStdin=True)
            for sandbox in (workspace_write(place.workspace), None)
        ]
        for process in running:
            peer.saw(process, b"up")
        subprocess.run([*inside, "mount", "-t", "tmpfs", "tmpfs", later], check=True)
        for process, code in zip(running, (1, 0), strict=True):
            peer.write(process, b"\n")
            assert peer.finished(process).exit_code == code
            seen = subprocess.run([*inside, "ls", later], check=True, capture_output=True).stdout
            assert (seen == b"") == bool(code)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_warm_helpers_know_what_was_mounted_since(tmp_path: Path) -> None:
    """A file that is written below a new mount lands there, and not beneath it."""
    place = Place(tmp_path)
    folder = place.workspace / "disk"
    folder.mkdir()
    sandbox = workspace_write(place.workspace)
    for shared in (SHARED, 'exec "$0" "$@"'):
        command = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", shared, COMMAND]
        with RunningServer(command=command) as server, WebSocketPeer(server.url, server.pid) as peer:
            peer.initialize()
            params = {"path": f"file://{folder}/x", "dataBase64": "", "sandbox": sandbox}
            peer.call("fs/writeFile", {**params, "path": f"file://{place.workspace}/y"})
            inside = ["nsenter", "--mount", f"--target={server.pid}"]
            subprocess.run([*inside, "mount", "-t", "tmpfs", "tmpfs", folder], check=True)
            peer.call("fs/writeFile", params)
            seen = subprocess.run([*inside, "ls", folder], check=True, capture_output=True).stdout
            assert seen == b"x\n"
            assert os.listdir(folder) == []


def test_inherited_descriptors(peer: WebSocketPeer, backend: str, tmp_path: Path) -> None:
    sandbox = Place(tmp_path).sandbox(backend)
    for tty in (False, True):
        assert not escaped(attempt(peer, sandbox, "inherited_descriptors", tty=tty))


KEYED = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
keyctl, add_key = {"x86_64": (250, 248), "aarch64": (219, 217)}[os.uname().machine]
assert libc.syscall(keyctl, 1, None) >= 0
assert libc.syscall(add_key, b"user", sys.argv[1].encode(), b"secret", 6, -3) >= 0
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_keys(backend: str) -> None:
    """A key in the session keyring of whoever started the server."""
    name = f"exec-server-escape-{os.getpid()}"
    keyctl = attempts.CALLS["keyctl"]
    if ctypes.CDLL(None).syscall(keyctl, 0, -3, 0) < 0:
        pytest.skip("this kernel keeps no keys")
    command = [sys.executable, "-I", "-c", KEYED, name]
    command += [COMMAND] if backend == "bubblewrap" else [*FORBIDDING, COMMAND]
    with RunningServer(command=command) as server, WebSocketPeer(server.url, server.pid) as peer:
        peer.initialize()
        for sandbox in (read_only(), read_only(network=True)):
            assert not escaped(attempt(peer, sandbox, "key", name))
        free = attempt(peer, None, "key", name)
        assert escaped(free)
        assert b"secret" in free.stdout


def test_programs_that_change_the_user(peer: WebSocketPeer, backend: str, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a program that changes the user")
    program = tmp_path / "id"
    shutil.copy("/usr/bin/id", program)
    os.chown(program, 65534, 65534)
    program.chmod(0o6755)
    free = attempt(peer, None, "set_user", program)
    if not escaped(free):
        pytest.skip("temporary files are on a disk that is mounted nosuid")
    assert not escaped(attempt(peer, Place(tmp_path).sandbox(backend), "set_user", program))


def test_typing_into_the_terminal(servers: Callable[[str], WebSocketPeer]) -> None:
    """Only in a view: under Landlock the terminal is the command's own, and nobody else reads it."""
    peer = servers("bubblewrap")
    assert not escaped(attempt(peer, read_only(), "type_ahead", "-", tty=True))
    enabled = Path("/proc/sys/dev/tty/legacy_tiocsti")
    if not enabled.exists() or enabled.read_text().strip() == "1":
        assert attempt(peer, None, "type_ahead", "-", tty=True).exit_code == 0


def test_nobody_is_left_behind(servers: Callable[[str], WebSocketPeer], tmp_path: Path) -> None:
    """Children that leave the session and the group, and shed what marks them, go with the sandbox."""
    peer = servers("bubblewrap")
    place = Place(tmp_path)
    shed = "import os, resource; resource.setrlimit(15, (1000, 1000)); os.setsid(); print('up', flush=True)"
    wait = "import time; time.sleep(1000)"
    script = f'{sys.executable} -c "{shed}; {wait}" & sleep 1000'
    env = {"MARK": str(place.target)}
    running = start_in(peer, place.sandbox("bubblewrap"), "/bin/bash", "-c", script, env=env)
    peer.saw(running, b"up")

    def marked() -> list[str]:
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if f"MARK={place.target}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
            except OSError:
                continue
        return found

    assert len(marked()) >= 2
    peer.terminate(running)
    assert peer.finished(running).exit_code == 137
    eventually(lambda: not marked(), "the end of everybody inside")
