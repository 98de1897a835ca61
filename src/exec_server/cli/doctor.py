"""`exec-server doctor`: what this machine can do to sandbox commands, what it cannot, and the cure."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final, Literal

import click
from msgspec import Struct

if TYPE_CHECKING:
    from ..local.sandbox import probe

__all__ = ["doctor"]

Verdict = Literal["ok", "weak", "missing"]

_MARKS: Final[dict[Verdict, str]] = {"ok": "ok", "weak": "!!", "missing": "--"}

_BACKENDS: Final = {
    "bubblewrap": "Sandboxes work in full: bubblewrap puts together the view, filters close the network.",
    "landlock": "Some sandboxes work: Landlock carries out profiles that protect nothing inside of what can "
    "be written. A usual workspace-write profile is refused, because .git must stay read-only.",
    "filter": "Only the network can be closed. Profiles that restrict files are refused.",
    "none": "There is no sandbox: every profile that restricts anything is refused.",
}

_UNSHARE: Final = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000):
    sys.exit(os.strerror(ctypes.get_errno()))
"""
"""Asks for a user namespace (CLONE_NEWUSER), in a process of its own."""


class Finding(Struct, frozen=True):
    """One thing that was looked at. `cure` says what to do about it, in words."""

    name: str
    verdict: Verdict
    found: str
    cure: str = ""


class Report(Struct, frozen=True):
    """Everything. `backend` is what a server would use now."""

    backend: str
    summary: str
    findings: list[Finding]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON object.")
def doctor(as_json: bool) -> None:
    """Try out what sandboxes need here, and say what works, what does not, and the cure.

    Looks as the user who runs it. The exit code is 0 if sandboxes work in full, 1 if not.
    """
    report = examine()
    if as_json:
        from msgspec import json

        click.echo(json.format(json.encode(report), indent=2))
    else:
        _print(report)
    refused = any(finding.name == "mounts" and finding.verdict != "ok" for finding in report.findings)
    sys.exit(0 if report.backend == "bubblewrap" and not refused else 1)


def examine() -> Report:
    """Look at everything, one after the other."""
    from ..local.sandbox import probe

    backend = probe.probe()
    if sys.platform != "linux":
        system = Finding("system", "missing", sys.platform, "sandboxes need Linux")
        return Report(backend.name, _BACKENDS[backend.name], [system])
    findings = [
        Finding("system", "ok", f"Linux {os.uname().release}, {os.uname().machine}, {_user()}"),
        _bubblewrap(backend),
        _user_namespaces(backend),
        *_settings(),
        _proc(backend),
        _mounts(backend),
        _landlock(),
        _seccomp(),
    ]
    found = [finding for finding in findings if finding]
    summary = _BACKENDS[backend.name]
    if any(finding.name == "mounts" and finding.verdict != "ok" for finding in found):
        summary = "But views are refused as long as mounts are shared."
    return Report(backend.name, summary, found)


def _print(report: Report) -> None:
    width = max(len(finding.name) for finding in report.findings)
    for finding in report.findings:
        click.echo(f"{_MARKS[finding.verdict]}  {finding.name.ljust(width)}  {finding.found}")
        if finding.cure:
            click.echo(f"    {' ' * width}  {finding.cure}")
    click.echo()
    click.echo(f"Backend in use: {report.backend}. {report.summary}")


def _user() -> str:
    return "as root" if os.geteuid() == 0 else f"as user {os.geteuid()}"


def _bubblewrap(backend: probe.Backend) -> Finding:
    from ..local.sandbox.probe import find_program

    if backend.name == "bubblewrap":
        return Finding(
            "bubblewrap", "ok", f"{backend.version.removeprefix('bubblewrap ')} at {backend.program}"
        )
    program = find_program("bwrap")
    if program is None:
        cure = "install it: apt install bubblewrap, dnf install bubblewrap, apk add bubblewrap, ..."
        return Finding("bubblewrap", "missing", "not installed: there is no bwrap in PATH", cure)
    why = next((reason for reason in backend.reasons if program in reason), "it cannot be used")
    return Finding("bubblewrap", "missing", why.partition("; ")[0], _cure_of(why))


def _cure_of(why: str) -> str:
    """By what bubblewrap said. The usual reasons have the usual cures."""
    if "0.5 or later" in why:
        return "install a newer bubblewrap: 0.5 or later"
    if "ermission denied" in why or "not permitted" in why or "No space left" in why:
        return "see user namespaces below; a container's seccomp profile must allow unshare and mount"
    return "run that command by hand to see more: bwrap --unshare-user --ro-bind / / true"


def _user_namespaces(backend: probe.Backend) -> Finding:
    from ..local.sandbox.probe import try_run

    if backend.name == "bubblewrap":
        return Finding("user namespaces", "ok", "can be made")
    trial = try_run([sys.executable, "-I", "-S", "-c", _UNSHARE])
    if trial.code == 0:
        return Finding("user namespaces", "ok", "can be made")
    if trial.code is None:
        return Finding("user namespaces", "weak", f"could not be tried: {trial.output.strip()}")
    said = trial.output.strip() or f"exit code {trial.code}"
    cures = [finding.cure for finding in _settings() if finding.cure]
    cure = "; ".join(cures) or (
        "nothing in /proc/sys forbids it, so a container's seccomp profile or a security module does: "
        "run the container with one that allows unshare(CLONE_NEWUSER)"
    )
    return Finding("user namespaces", "missing", f"cannot be made: {said}", cure)


def _settings() -> list[Finding]:
    """Switches of the kernel that forbid user namespaces, where they are there and on."""
    findings = []
    limit = _number("/proc/sys/user/max_user_namespaces")
    if limit == 0:
        cure = "sysctl user.max_user_namespaces=15000"
        findings.append(Finding("user.max_user_namespaces", "missing", "0: nobody may make any", cure))
    if _number("/proc/sys/kernel/unprivileged_userns_clone") == 0:
        cure = "sysctl kernel.unprivileged_userns_clone=1, or run the server as root"
        found = "0: only root may make user namespaces"
        findings.append(Finding("kernel.unprivileged_userns_clone", _unless_root(), found, cure))
    if _number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1:
        cure = (
            "give bwrap an AppArmor profile with the rule `userns,` (Ubuntu ships one in the package "
            "apparmor-profiles), or sysctl kernel.apparmor_restrict_unprivileged_userns=0"
        )
        found = "1: programs without an AppArmor profile may make no user namespaces"
        findings.append(Finding("AppArmor", _unless_root(), found, cure))
    return findings


def _unless_root() -> Verdict:
    return "weak" if os.geteuid() == 0 else "missing"


def _proc(backend: probe.Backend) -> Finding | None:
    if backend.name != "bubblewrap":
        return None
    if backend.proc:
        return Finding("fresh /proc", "ok", "can be mounted: commands see only each other")
    cure = "a container that masks parts of /proc forbids it; unmask them (podman: --security-opt unmask=ALL)"
    return Finding("fresh /proc", "weak", "cannot be mounted: commands see the host's processes", cure)


def _mounts(backend: probe.Backend) -> Finding | None:
    from ..local.sandbox import mounts, probe

    if backend.name != "bubblewrap" or backend.program is None:
        return None
    if not mounts.mounts().spread:
        return Finding("mounts", "ok", "private: what is mounted later does not appear in sandboxes")
    found = probe.try_partition(backend.program)
    if not found.problem:
        return Finding("mounts", "ok", "shared, and kept out of sandboxes by unshare")
    cure = (
        "install util-linux; where AppArmor keeps unshare from it, a profile for it with the rule `userns,`; "
        "or have systemd start the server with PrivateMounts=yes and MountFlags=private"
    )
    what = "shared: what is mounted later would appear in sandboxes, so they are refused"
    return Finding("mounts", "missing", f"{what} ({found.problem})", cure)


def _landlock() -> Finding:
    from ..local.sandbox import landlock

    version = landlock.abi()
    if version >= landlock.MINIMUM_ABI:
        return Finding("Landlock", "ok", f"version {version} (used where bubblewrap cannot be)")
    found = f"version {version}; {landlock.MINIMUM_ABI} is needed" if version else "not there"
    cure = "needs Linux 6.2 or later, built with CONFIG_SECURITY_LANDLOCK and with landlock in its lsm= list"
    return Finding("Landlock", "missing", found, cure)


def _seccomp() -> Finding:
    from ..local.sandbox import confine, seccomp

    try:
        problem = confine.can_filter(seccomp.program("closed"))
    except seccomp.Unsupported as error:
        problem = str(error)
    if problem is None:
        return Finding("seccomp", "ok", "system calls can be filtered")
    cure = "needs a kernel with CONFIG_SECCOMP_FILTER, on x86-64 or aarch64"
    return Finding("seccomp", "missing", f"system calls cannot be filtered: {problem}", cure)


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
