"""From a profile to a plan. Nothing is run, and nothing but a Machine is asked.

How links are treated: rules hold for what paths really lead to, so a file cannot be reached by another of
its names. Where a rule forbids something through a link that somebody inside of the sandbox could turn
elsewhere, or allows something through one, there is no plan at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from ...wire.sandbox import Access, SandboxContext
from .entries import MINIMAL_ROOTS, Policy, Rule, has_full_read, has_full_write, resolve_entries
from .globs import expand, search_root
from .links import Look, Real, resolve
from .look import Machine
from .plan import (
    Bind,
    EmptyFile,
    Identity,
    Link,
    MountPoint,
    Network,
    Plan,
    PlanError,
    PrivateDevices,
    ReadOnly,
    Step,
    Tmpfs,
    covers,
    depth,
)

__all__ = ["compile_plan"]

PROTECTED_NAMES: Final = (b".git", b".agents", b".codex", b".aws")
"""Directly in a writable root these stay as they are: what is in them is run or trusted later, outside."""

_STRENGTH: Final[dict[Access, int]] = {"read": 0, "write": 1, "deny": 2}
_PROC: Final = b"/proc"
_FORBIDS: Final[dict[Access, str]] = {"read": "read-only", "deny": "deny-read", "write": "writable"}


def compile_plan(
    context: SandboxContext,
    machine: Machine,
    *,
    cwd: bytes,
    tmpdir: bytes | None = None,
    readable: Sequence[bytes] = (),
    hidden: Sequence[bytes] = (),
    kept: Sequence[bytes] = (),
    proxy: bool = False,
    for_files: bool = False,
) -> Plan:
    """The plan, or PlanError if there is none that does what the profile says.

    `cwd` is where a command is to start, and the policy's own directory if it names none. `readable` is
    what whoever runs inside needs to exist at all (an interpreter, a launcher), `hidden` what nobody
    inside may see whatever the profile says, `kept` what nobody inside may change unless the profile names
    it: the server runs it. `proxy`: the network leads to proxies only. `for_files`: for
    the helper that does file calls: it starts in `/`, without a network or anything of its own to write to.
    """
    network: Network = "proxy" if proxy else "open" if context.network == "enabled" else "closed"
    if for_files:
        network = "closed"
    if has_full_write(context):
        real = resolve(cwd, machine.look)
        place = real.path if real.exists else b"/"
        if network == "proxy":
            whole = Bind(b"/", b"/", writable=True)
            mounts, spread = machine.mounts()
            return Plan(
                kind="view",
                network=network,
                steps=(whole,),
                writable=(b"/",),
                mounts=mounts,
                spread=spread,
                cwd=place,
            )
        return Plan(
            kind="plain" if network == "open" else "filter", network=network, writable=(b"/",), cwd=place
        )
    policy = resolve_entries(context, machine, cwd, tmpdir)
    if for_files and not has_full_read(context):
        policy = replace(policy, minimal=True)
    view = _View(machine, policy, readable, hidden, kept, network=network, for_files=for_files)
    return view.plan(network, cwd, sealed=for_files)


# The view ----------------------------------------------------------------------------------------


class _Node(NamedTuple):
    """What is to be at a path of the view."""

    access: Access
    look: Look
    guard: Literal["file", "directory", None] = None
    """What stands where there must be nothing, so that nobody can make it."""
    derived: bool = False
    """Found by a pattern, not named."""
    settled: Identity | None = None
    """Which file it is, of what nobody named and everybody needs."""


class _View:
    """Rules by what they really are about, and from there the steps."""

    def __init__(
        self,
        machine: Machine,
        policy: Policy,
        readable: Sequence[bytes],
        hidden: Sequence[bytes],
        kept: Sequence[bytes],
        *,
        network: Network,
        for_files: bool,
    ) -> None:
        self._machine = machine
        self._for_files = for_files
        """Nobody but our own helper runs inside, which changes no modes of directories."""
        self._nodes: dict[bytes, _Node] = {}
        self._links: dict[bytes, bytes] = {}
        self._written_as: set[bytes] = set()
        """Writable paths as they were named: what names them itself may be written in protected places."""
        self._searched: set[bytes] = set()
        """Directories that patterns begin with."""
        self._fixed: set[bytes] = set()
        """Directories in which something must not be made, and need not be covered, as nobody can."""
        self._protected: list[bytes] = []
        """Protected names in writable roots, whether they were named or not."""

        temporary = [rule for rule in policy.rules if rule.access == "write" and not rule.trusted]
        rules = [rule for rule in policy.rules if rule not in temporary]
        self._missing = self._place(rules)
        """What must not change, and is not there."""
        self._place_needed((*(MINIMAL_ROOTS if policy.minimal else ()), *readable))
        self._check_links(rules)
        self._protect_metadata()
        if self._place_temporary(temporary, kept):
            # What was safe before may not be, now that there is one more place to write to.
            self._check_links(rules)
            self._protect_metadata()
        self._keep(kept)
        self._deny_matches(policy)
        self._hide(hidden)
        self._hide(machine.private(), unless_out_of_reach=network != "open")
        self._guard_missing()
        self._drop_redundant()

    # Rules

    def _place(self, rules: Iterable[Rule]) -> list[tuple[Real, Access]]:
        """Give every rule its place; those that forbid something that is not there are handed back."""
        missing: list[tuple[Real, Access]] = []
        for rule in rules:
            real = self._resolve(rule.path)
            if rule.access == "deny" and real.path != _PROC and covers(_PROC, real.path):
                raise PlanError(
                    f"cannot enforce sandbox deny-read path {_text(rule.path)}: inside there is another "
                    "/proc, with its own processes and no others; deny /proc as a whole"
                )
            if rule.access == "write":
                self._written_as |= {rule.path, real.path}
            if not real.exists:
                missing.append((real, rule.access))
                continue
            before = self._nodes.get(real.path)
            if before is None or _STRENGTH[before.access] < _STRENGTH[rule.access]:
                self._nodes[real.path] = _Node(rule.access, real.look)
            if rule.access != "deny":
                self._links.update(real.links)
        return missing

    def _place_needed(self, paths: Iterable[bytes]) -> None:
        for path in paths:
            real, identity = self._machine.settled(path)
            if real.exists:
                self._nodes.setdefault(real.path, _Node("read", real.look, settled=identity))
                self._links.update(real.links)

    def _place_temporary(self, rules: Iterable[Rule], kept: Sequence[bytes]) -> bool:
        """TMPDIR: a place to write to, wherever it is, but never one to write to what is protected. It comes
        last, so that what is protected is known: whoever can turn a link on the way could choose. Whether
        there is one."""
        placed = False
        for rule in rules:
            real = self._resolve(rule.path)
            access = self._access(real.path)
            if not real.exists or access == "deny" or self._is_kept(real.path):
                continue
            if any(covers(place, real.path) for place in kept):
                continue
            if access == "write" and any(self._access(link) == "write" for link, _ in real.links):
                continue  # it allows nothing that is not allowed by another name
            if real.path == b"/" and access != "write":
                raise PlanError("TMPDIR is /, and everything could be written: name a directory of its own")
            self._check_way(rule.path, "write", real.links)
            self._nodes[real.path] = _Node("write", real.look)
            self._links.update(real.links)
            placed = True
        return placed

    def _is_kept(self, path: bytes) -> bool:
        """Whether it must not change though it is, with whatever is kept around it, in a place that can be
        written."""
        place: bytes | None = path if path in self._nodes else self._above(path)
        if place is None or self._nodes[place].access == "write":
            return False
        while place is not None and self._nodes[place].access != "write":
            place = self._above(place)
        return place is not None

    def _keep(self, paths: Iterable[bytes]) -> None:
        """What must not change unless it was named."""
        for path in paths:
            real, identity = self._machine.settled(path)
            if real.exists and self._access(real.path) == "write" and real.path not in self._written_as:
                self._check_way(path, "read", real.links)
                self._nodes[real.path] = _Node("read", real.look, settled=identity)

    def _check_links(self, rules: Iterable[Rule]) -> None:
        for rule in rules:
            self._check_way(rule.path, rule.access, self._resolve(rule.path).links)

    def _check_way(self, path: bytes, access: Access, links: Iterable[tuple[bytes, bytes]]) -> None:
        for link, _ in links:
            if self._access(link) == "write":
                raise PlanError(
                    f"cannot enforce sandbox {_FORBIDS[access]} path {_text(path)} "
                    f"because it crosses writable symlink {_text(link)}"
                )

    def _protect_metadata(self) -> None:
        roots = [path for path, node in self._nodes.items() if _is_writable_directory(node)]
        places = {root: [_below(root, name) for name in PROTECTED_NAMES] for root in roots}
        self._protected += [path for paths in places.values() for path in paths]
        for root in roots:
            if any(covers(path, root) for path in self._protected):
                continue  # it is itself in such a place, and was named
            for path in places[root]:
                self._protect(root, path)

    def _protect(self, root: bytes, path: bytes) -> None:
        look = self._machine.look(path)
        if path in self._written_as:
            return
        if look.kind == "link":
            self._check_way(path, "read", ((path, look.leads_to),))
        if look.kind == "file" and path.endswith(b"/.git"):
            self._protect_git_directory(root, path)
        elif look.kind == "directory" and path.endswith(b"/.git"):
            self._protect_named(path, self._machine.head(_below(path, b"commondir")))
        node = self._nodes.get(path)
        access: Access = "deny" if node is not None and node.access == "deny" else "read"
        if look.kind == "missing" or (look.kind == "directory" and self._machine.is_empty(path)):
            if look.kind != "missing" or self._can_be_made(path, access):
                self._nodes[path] = _Node(access, look, guard="directory")
        elif node is None:
            self._nodes[path] = _Node("read", look)

    def _protect_git_directory(self, root: bytes, file: bytes) -> None:
        """What a worktree's `.git` file leads to, and the repository that this belongs to."""
        prefix, _, place = self._machine.head(file).partition(b":")
        if prefix.strip() == b"gitdir":
            own = self._protect_named(root, place)
            if own is not None:
                self._protect_named(own, self._machine.head(_below(own, b"commondir")))

    def _protect_named(self, root: bytes, place: bytes) -> bytes | None:
        """A directory that a file of git's names; its real path, if it names one that is there."""
        place = place.strip()
        if not place or b"\n" in place or b"\0" in place:
            return None
        real = self._resolve(os.path.join(root, place))
        self._check_way(real.path, "read", real.links)
        if _leads_back(place):
            raise PlanError(
                f"cannot enforce sandbox read-only path {_text(real.path)} because {_text(root)} names it by "
                f"a way that leads back, which somebody inside could turn elsewhere: {_text(place)}"
            )
        if not real.exists:
            self._missing.append((real, "read"))
            return None
        if real.path not in self._written_as and self._access(real.path) == "write":
            self._nodes.setdefault(real.path, _Node("read", real.look))
        return real.path

    def _deny_matches(self, policy: Policy) -> None:
        self._searched = {self._resolve(search_root(pattern)).path for pattern in policy.patterns}
        for path in expand(policy.patterns, policy.pattern_depth, self._machine):
            real = self._resolve(path)
            self._check_way(path, "deny", real.links)
            access = self._access(real.path)
            if real.look.unseen and access == "write":
                raise PlanError(
                    f"cannot cover {_text(real.path)}, which a pattern denies: the mode of "
                    f"{_text(real.existing)} forbids to look, and a command could change that"
                )
            if real.exists and access in ("read", "write"):
                # A mask that moves along protects as well, but for what is known by another name.
                derived = not real.links and real.path not in self._nodes
                self._nodes[real.path] = _Node("deny", real.look, derived=derived)

    def _hide(self, paths: Iterable[bytes], *, unless_out_of_reach: bool = False) -> None:
        """Deny, whatever the rules say. A socket is out of reach of who has no network and cannot
        replace it."""
        for path in paths:
            real = self._resolve(path)
            access = self._access(real.path)
            if real.exists and access is not None and (access == "write" or not unless_out_of_reach):
                self._nodes[real.path] = _Node("deny", real.look)

    def _can_be_made(self, path: bytes, access: Access) -> bool:
        """Whether somebody inside could make what is not there; PlanError if nobody can prevent it."""
        directory = os.path.dirname(path)
        maker = self._machine.maker(directory)
        if self._for_files and maker != "anybody":
            return False
        if maker == "owner alone":
            raise PlanError(
                f"cannot enforce sandbox {_FORBIDS[access]} path {_text(path)} because the mode of "
                f"{_text(directory)} keeps this server from covering it, and a command could change that: "
                "make the directory writable for its owner, or take it out of what may be written"
            )
        return maker != "nobody"

    def _guard_missing(self) -> None:
        """Somebody who may write could make what must not be there, or must not change.

        So it is with a writable root that is not there: made inside, it would have nothing protected in it.
        """
        for path, node in list(self._nodes.items()):
            if node.look.blank and self._access(path, but=path) == "write":
                access: Access = "deny" if node.access == "deny" else "read"
                # It may itself be such a guard.
                self._nodes[path] = node._replace(access=access, guard="file")
        for real, wanted in self._missing:
            if wanted == "write" and any(covers(path, real.path) for path in self._protected):
                continue  # it is itself in a protected place, and was named
            access = "deny" if wanted == "deny" else "read"
            place = real.first_missing
            parent = os.path.dirname(place)
            if real.look.unseen and self._access(parent) == "write":
                raise PlanError(
                    f"cannot enforce sandbox {_FORBIDS[access]} path {_text(real.path)}: the mode of "
                    f"{_text(parent)} forbids to look, and a command could change that"
                )
            look = self._machine.look(parent)
            if look.blank:
                place, parent = parent, os.path.dirname(parent)
            elif self._access(parent) != "write":
                continue
            elif look.kind != "directory":
                raise PlanError(
                    f"cannot enforce sandbox {_FORBIDS[wanted]} path {_text(real.path)} "
                    f"because {_text(parent)} is not a directory"
                )
            if self._access(parent) != "write":
                continue
            if not self._can_be_made(place, access):
                self._fixed.add(parent)  # nobody makes it there; nor may something else take the place
                continue
            before = self._nodes.get(place)
            if before is None:
                self._nodes[place] = _Node(access, look, guard="file")
            elif before.guard is not None and access == "deny":
                self._nodes[place] = before._replace(access="deny")

    def _drop_redundant(self) -> None:
        """What is as its surroundings are needs no step of its own. (Writable roots keep theirs: being a
        mount, they cannot be renamed.)"""
        for path, node in list(self._nodes.items()):
            above = self._above(path)
            same = above is not None and self._nodes[above].access == node.access
            if same and node.access != "write" and node.guard is None:
                del self._nodes[path]

    # Asking

    def _resolve(self, path: bytes) -> Real:
        return resolve(path, self._machine.look)

    def _above(self, path: bytes) -> bytes | None:
        """The nearest rule strictly above a path."""
        while path != b"/":
            path = os.path.dirname(path)
            if path in self._nodes:
                return path
        return None

    def _access(self, path: bytes, but: bytes | None = None) -> Access | None:
        """What holds for a path; `but` for one rule."""
        if path in self._nodes and path != but:
            return self._nodes[path].access
        above = self._above(path)
        return None if above is None else self._nodes[above].access

    # Steps

    def plan(self, network: Network, cwd: bytes, *, sealed: bool) -> Plan:
        """The plan. `sealed`: what is private and forgotten cannot be written either."""
        steps: list[Step] = []
        seals: list[Step] = []
        root = self._nodes.get(b"/")
        scoped = root is None or root.access == "deny"
        if scoped:
            steps += [Tmpfs(b"/"), PrivateDevices()]
            if sealed:
                seals.append(ReadOnly(b"/"))
        else:
            writable = root is not None and root.access == "write"
            steps += [Bind(b"/", b"/", writable=writable), PrivateDevices()]
        if sealed:
            seals += [ReadOnly(b"/dev"), ReadOnly(b"/proc")]
        ordered = sorted({*self._nodes, *self._pins()} - {b"/"}, key=lambda path: (depth(path), path))
        for path in ordered:
            self._add(path, steps, seals)
        links = self._missing_links() if scoped else []
        mounts, spread = self._machine.mounts()
        plan = Plan(
            kind="view",
            network=network,
            steps=(*steps, *links, *seals),
            created=tuple(sorted(self._created())),
            readable=self._paths_that("readable"),
            writable=self._paths_that("writable"),
            read_only=self._paths_that("read-only"),
            denied=self._paths_that("denied"),
            seen=self._seen(ordered),
            mounts=mounts,
            spread=spread,
        )
        if sealed:
            return plan
        real = self._resolve(cwd)
        visible = real.exists and plan.access(real.path) != "none"
        return replace(plan, cwd=real.path) if visible else plan

    def _created(self) -> list[MountPoint]:
        return [
            MountPoint(path, node.guard == "directory")
            for path, node in self._nodes.items()
            if node.guard is not None
        ]

    def _pins(self) -> set[bytes]:
        """Directories between a writable root and something in it that has a rule of its own, be it another
        writable root: in that something is protected. Being mounts they cannot be renamed, and so nobody
        can put something else in the place of what is protected."""
        pins: set[bytes] = set()
        for path, node in self._nodes.items():
            if not node.derived:  # a mask that moves along protects as well
                self._pin(os.path.dirname(path), pins)
        for place in self._searched | self._fixed:
            # But what a pattern begins with must stay, or the pattern fits nothing the next time.
            if self._machine.look(place).kind == "directory":
                self._pin(place, pins)
        return pins

    def _pin(self, path: bytes, pins: set[bytes]) -> None:
        """A directory, and those above it as far as they can be written."""
        while path not in self._nodes and path not in pins and self._access(path) == "write":
            pins.add(path)
            path = os.path.dirname(path)

    def _add(self, path: bytes, steps: list[Step], seals: list[Step]) -> None:
        node = self._nodes.get(path)
        if covers(_PROC, path) and (node is None or node.access != "deny"):
            return  # a fresh one is there already, and the host's must not take its place
        if node is None or node.access == "write":
            steps.append(Bind(path, path, writable=True))
        elif node.guard == "directory":
            steps += [Tmpfs(path, 0 if node.access == "deny" else 0o555), ReadOnly(path)]
        elif node.guard == "file":
            steps.append(EmptyFile(path))
        elif node.access == "read":
            steps.append(Bind(path, path))
        elif node.look.kind == "directory":
            within = any(other != path and covers(path, other) for other in self._nodes)
            steps.append(Tmpfs(path, 0o111 if within else 0))
            (seals if within else steps).append(ReadOnly(path))
        else:
            steps.append(EmptyFile(path, 0))

    def _missing_links(self) -> list[Step]:
        """Links of the host in directories that the view does not have."""
        return [
            Link(link, leads_to)
            for link, leads_to in sorted(self._links.items())
            if self._above(link) in (None, b"/")
        ]

    def _paths_that(self, wanted: str) -> tuple[bytes, ...]:
        """The rules of one kind."""
        return tuple([path for path in sorted(self._nodes) if self._kind(path) == wanted])

    def _kind(self, path: bytes) -> str:
        access = self._nodes[path].access
        if access != "read":
            return "writable" if access == "write" else "denied"
        return "read-only" if self._access(path, but=path) == "write" else "readable"

    def _seen(self, paths: list[bytes]) -> tuple[Identity, ...]:
        found = []
        around = {os.path.dirname(path) for path, node in self._nodes.items() if node.derived}
        for path in [*paths, *sorted(around.difference(paths) - {b"/"})]:
            node = self._nodes.get(path)
            if node is not None and node.settled is not None:
                found.append(node.settled)
            elif node is None or node.guard is None:
                found.append(self._machine.identity(path))
        return tuple(found)


def _leads_back(place: bytes) -> bool:
    """Whether a path goes into a directory and out again."""
    parts = [part for part in place.split(b"/") if part not in (b"", b".")]
    return any(part == b".." and before != b".." for before, part in pairwise(parts)) or (
        place.startswith(b"/") and b".." in parts
    )


def _is_writable_directory(node: _Node) -> bool:
    return node.access == "write" and node.look.kind == "directory"


def _below(root: bytes, name: bytes) -> bytes:
    return b"%b/%b" % (b"" if root == b"/" else root, name)


def _text(path: bytes) -> str:
    return path.decode("utf-8", "replace")
