"""Plans: what each profile becomes, and that a plan's answer is what the rules of the protocol say."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.local.sandbox.compile import PROTECTED_NAMES, compile_plan
from exec_server.local.sandbox.links import Look
from exec_server.local.sandbox.look import Maker
from exec_server.local.sandbox.mounts import Mounts
from exec_server.local.sandbox.plan import (
    Bind,
    EmptyFile,
    Link,
    MountPoint,
    Plan,
    PlanError,
    PrivateDevices,
    ReadOnly,
    Tmpfs,
    covers,
    depth,
)
from exec_server.wire.sandbox import decode_sandbox
from support.profiles import context, path, pattern, sandbox, special
from support.tree import Tree

ROOT, WRITE_ROOT = special("root", "read"), special("root", "write")
W = path("/w", "write")
SYSTEM = {"/usr/bin/sh": b"", "/etc/passwd": b"", "/bin": "usr/bin", "/tmp": None}
GUARDS = tuple(b"/w/" + name for name in sorted(PROTECTED_NAMES))


def compiled(tree: dict[str, Any], *entries: Any, cwd: str = "/", **more: Any) -> Plan:
    options = {
        name: more.pop(name) for name in ("readable", "hidden", "kept", "proxy", "for_files") if name in more
    }
    options["tmpdir"] = more.pop("tmpdir", None)
    return compile_plan(context(*entries, **more), Tree(SYSTEM | tree), cwd=os.fsencode(cwd), **options)


def guard(name: bytes) -> tuple[Any, ...]:
    return Tmpfs(name, 0o555), ReadOnly(name)


# Kinds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("permissions", "kind", "network"),
    [
        ({"type": "disabled"}, "plain", "open"),
        ({"type": "external", "network": "enabled"}, "plain", "open"),
        ({"type": "external", "network": "restricted"}, "filter", "closed"),
        (
            {"type": "managed", "file_system": {"type": "unrestricted"}, "network": "restricted"},
            "filter",
            "closed",
        ),
    ],
)
def test_what_restricts_no_file_needs_no_view(permissions: Any, kind: str, network: str) -> None:
    plan = compile_plan(decode_sandbox(sandbox(permissions)), Tree({"/x": None}), cwd=b"/x")
    assert (plan.kind, plan.network, plan.steps, plan.cwd) == (kind, network, (), b"/x")
    assert plan.access(b"/anything") == "write"


def test_proxies_need_a_network_of_their_own_and_so_a_view() -> None:
    plan = compiled({}, WRITE_ROOT, proxy=True)
    assert (plan.kind, plan.network, plan.steps) == ("view", "proxy", (Bind(b"/", b"/", True),))
    assert compiled({}, ROOT, network="enabled", proxy=True).network == "proxy"


def test_network() -> None:
    assert compiled({}, ROOT).network == "closed"
    assert compiled({}, ROOT, network="enabled").network == "open"
    assert compiled({}, ROOT, network="enabled", for_files=True).network == "closed"


# Steps -------------------------------------------------------------------------------------------


def test_read_only() -> None:
    plan = compiled({"/w": None}, ROOT, cwd="/w")
    assert plan.steps == (Bind(b"/", b"/"), PrivateDevices())
    assert (plan.readable, plan.created, plan.cwd) == ((b"/",), (), b"/w")


def test_a_writable_root_protects_what_is_in_it() -> None:
    plan = compiled({"/w/.git/config": b"x", "/w/.codex": None}, ROOT, W)
    assert plan.steps == (
        Bind(b"/", b"/"),
        PrivateDevices(),
        Bind(b"/w", b"/w", True),
        *guard(b"/w/.agents"),
        *guard(b"/w/.aws"),
        *guard(b"/w/.codex"),  # an empty one may be what another sandbox has put there
        Bind(b"/w/.git", b"/w/.git"),
    )
    made = [b"/w/.agents", b"/w/.aws", b"/w/.codex"]
    assert plan.created == tuple(MountPoint(name, True) for name in made)
    assert plan.read_only == GUARDS


def test_what_stands_guard_depends_on_who_could_make_something() -> None:
    tree = Tree(SYSTEM | {"/w": None})
    wanted: dict[Maker, tuple[int, int]] = {"nobody": (0, 0), "anybody": (5, 5), "owner": (5, 0)}
    for maker, (command, files) in wanted.items():
        tree.makers[b"/w"] = maker
        profile = context(ROOT, W, path("/w/miss", "deny"))
        assert len(compile_plan(profile, tree, cwd=b"/").created) == command
        # A helper for files is our own program, and changes no modes of directories.
        assert len(compile_plan(profile, tree, cwd=b"/", for_files=True).created) == files


def test_what_its_owner_could_make_and_nobody_can_cover_is_refused() -> None:
    tree = Tree(SYSTEM | {"/w": None})
    tree.makers[b"/w"] = "owner alone"
    with pytest.raises(PlanError, match=r"path /w/\.git because the mode of /w keeps this server from"):
        compile_plan(context(ROOT, W), tree, cwd=b"/")
    assert compile_plan(context(ROOT, W), tree, cwd=b"/", for_files=True).created == ()
    everything_named = [path(b"/w/" + name, "write") for name in PROTECTED_NAMES]
    assert compile_plan(context(ROOT, W, *everything_named), tree, cwd=b"/").created == ()


def test_named_metadata_may_be_written() -> None:
    tree = {"/w/.git/refs/x": b"", "/w/.git/config": b""}
    named = compiled(tree, ROOT, W, path("/w/.git", "write"))
    assert named.access(b"/w/.git/config") == "write"
    below = compiled(tree, ROOT, W, path("/w/.git/refs", "write"))
    assert (below.access(b"/w/.git/config"), below.access(b"/w/.git/refs/x")) == ("read", "write")
    # What is itself metadata has none.
    assert not any(point.path.startswith(b"/w/.git") for point in below.created)
    missing = compiled({"/w": None}, ROOT, W, path("/w/.codex", "write"))
    assert (missing.access(b"/w/.codex"), missing.access(b"/w/.git")) == ("write", "read")
    project = {"workspaceRoots": ["file:///w"], "cwd": "file:///w"}
    as_subpath = special("project_roots", "write", subpath=".git")
    assert compiled(tree, ROOT, W, as_subpath, **project).access(b"/w/.git/config") == "write"


def test_denied_metadata() -> None:
    existing = compiled({"/w/.git/x": b""}, ROOT, W, path("/w/.git", "deny"))
    assert Tmpfs(b"/w/.git", 0) in existing.steps
    missing = compiled({"/w": None}, ROOT, W, path("/w/.codex", "deny"))
    assert Tmpfs(b"/w/.codex", 0) in missing.steps
    assert missing.access(b"/w/.codex") == "none"


def test_worktrees_protect_their_repository() -> None:
    tree = {"/w/main/.git/worktrees/wt/HEAD": b"", "/w/wt/.git": b"gitdir: ../main/.git/worktrees/wt\n"}
    # Outside of what can be written it needs no protection.
    assert compiled(tree, ROOT, path("/w/wt", "write")).access(b"/w/main/.git/worktrees/wt") == "read"
    both = compiled(tree, ROOT, path("/w/wt", "write"), path("/w", "write"))
    assert both.access(b"/w/main/.git/worktrees/wt/HEAD") == "read"
    assert both.access(b"/w/main/.git/config") == "write"
    assert both.access(b"/w/wt/.git") == "read"
    named = compiled(
        tree, ROOT, path("/w/wt", "write"), path("/w", "write"), path("/w/main/.git/worktrees/wt", "write")
    )
    assert named.access(b"/w/main/.git/worktrees/wt/HEAD") == "write"


@pytest.mark.parametrize(
    "content", [b"", b"gitdir:", b"gitdir: ", b"nothing", b"gitdir: missing", b"gitdir: a\nb"]
)
def test_files_that_lead_nowhere(content: bytes) -> None:
    plan = compiled({"/w/.git": content, "/w/a": None}, ROOT, W)
    assert (plan.access(b"/w/.git"), plan.access(b"/w/a")) == ("read", "write")


def test_masks() -> None:
    tree = {"/w/priv/p": b"", "/w/.env": b"x", "/o/s": b"", "/fifo": b""}
    plan = compiled(tree, ROOT, W, path("/w/priv", "deny"), path("/w/.env", "deny"), path("/o", "deny"))
    masks = [step for step in plan.steps if getattr(step, "target", b"") in (b"/w/priv", b"/w/.env", b"/o")]
    assert masks == [
        Tmpfs(b"/o", 0),
        ReadOnly(b"/o"),
        EmptyFile(b"/w/.env", 0),
        Tmpfs(b"/w/priv", 0),
        ReadOnly(b"/w/priv"),
    ]


def test_what_is_allowed_below_a_mask_is_there() -> None:
    tree = {"/w/in/x": b"", "/w/file": b"x", "/w/ro/y": b""}
    plan = compiled(
        tree, ROOT, path("/w", "deny"), path("/w/in", "write"), path("/w/file", "read"), path("/w/ro", "read")
    )
    assert plan.steps[2:4] == (Tmpfs(b"/w", 0o111), Bind(b"/w/file", b"/w/file"))
    assert Bind(b"/w/in", b"/w/in", True) in plan.steps
    assert plan.steps[-1] == ReadOnly(b"/w")  # when everything is in it
    wanted = {b"/w": "none", b"/w/file": "read", b"/w/in/x": "write", b"/w/ro/y": "read", b"/w/other": "none"}
    assert {place: plan.access(place) for place in wanted} == wanted


def test_missing_paths() -> None:
    plan = compiled(
        {"/w": None, "/o": None},
        ROOT,
        W,
        path("/w/miss/x/y", "deny"),
        path("/w/miss2/x", "read", missing_path_behavior="skip"),
        path("/w/miss3", "write"),
        path("/o/miss", "deny"),
        path("/nowhere/x", "read"),
    )
    guards = [step for step in plan.steps if isinstance(step, EmptyFile)]
    assert guards == [EmptyFile(b"/w/miss"), EmptyFile(b"/w/miss2"), EmptyFile(b"/w/miss3")]
    assert {MountPoint(b"/w/miss", False), MountPoint(b"/w/miss2", False)} <= set(plan.created)
    assert (plan.access(b"/w/miss"), plan.access(b"/w/miss2/x"), plan.access(b"/w/miss3")) == (
        "none",
        "read",
        "read",  # once made, it would be a root in which nothing is protected
    )


def test_writable_roots_that_are_missing() -> None:
    """Inside of what can be written nobody makes them; elsewhere nobody could anyway."""
    inside = compiled({"/w": None}, ROOT, W, path("/w/a/b", "write"))
    assert MountPoint(b"/w/a", False) in inside.created
    assert inside.access(b"/w/a/b") == "read"
    assert compiled({"/w": None}, ROOT, path("/w/a/b", "write")).created == ()
    # A directory for temporary files holds nothing that anybody trusts, and commands make theirs.
    for tmpdir in (b"/w/a", b"/tmp/a"):
        plan = compiled({"/w": None}, ROOT, W, special("tmpdir", "write"), tmpdir=tmpdir)
        assert plan.access(b"/w/a") == "write"
    with pytest.raises(PlanError, match="writable path /w/file/x because /w/file is not a directory"):
        compiled({"/w/file": b"content"}, ROOT, W, path("/w/file/x", "write"))
    # While another sandbox keeps it from being made, it is as missing as before.
    during = Tree(SYSTEM | {"/w": None, "/w/a": b""})
    during.blank.add(b"/w/a")
    profile = context(ROOT, W, path("/w/a", "write"))
    assert compile_plan(profile, during, cwd=b"/") == compile_plan(
        profile, Tree(SYSTEM | {"/w": None}), cwd=b"/"
    )


def test_what_stands_guard_for_another_sandbox_counts_as_missing() -> None:
    before, during = Tree(SYSTEM | {"/w": None}), Tree(SYSTEM | {"/w": None, "/w/miss": b""})
    during.blank.add(b"/w/miss")
    profile = context(ROOT, W, path("/w/miss/x", "deny"), path("/w/miss2", "read"))
    assert compile_plan(profile, before, cwd=b"/") == compile_plan(profile, during, cwd=b"/")
    itself = context(ROOT, W, path("/w/miss", "deny"))
    assert compile_plan(itself, before, cwd=b"/") == compile_plan(itself, during, cwd=b"/")
    # Where nobody could have put it there it is a file like any other.
    assert compile_plan(context(ROOT, path("/w/miss", "deny")), during, cwd=b"/").denied == (b"/w/miss",)


def test_a_file_where_a_directory_would_have_to_be() -> None:
    with pytest.raises(PlanError, match="deny-read path /w/file/x because /w/file is not a directory"):
        compiled({"/w/file": b"content"}, ROOT, W, path("/w/file/x", "deny"))
    assert compiled({"/w/file": b"content"}, ROOT, path("/w/file/x", "deny")).denied == ()


def test_directories_on_the_way_to_something_protected_cannot_be_renamed() -> None:
    plan = compiled({"/w/a/b/ro/x": b"", "/w/a/b/c.env": b"e"}, ROOT, W, path("/w/a/b/ro", "read"))
    assert {Bind(b"/w/a", b"/w/a", True), Bind(b"/w/a/b", b"/w/a/b", True)} <= set(plan.steps)
    found = compiled({"/w/a/b/c.env": b"e"}, ROOT, W, pattern("/w/**/*.env"))
    assert Bind(b"/w/a", b"/w/a", True) not in found.steps  # a mask that moves along protects as well
    assert found.access(b"/w/a/b/c.env") == "none"
    # What is protected in a writable root is lost with the root itself.
    nested = compiled({"/w/a/b/c/x": b""}, ROOT, W, path("/w/a/b/c", "write"))
    pins = {Bind(name, name, True) for name in (b"/w", b"/w/a", b"/w/a/b", b"/w/a/b/c")}
    assert pins <= set(nested.steps)
    apart = compiled({"/w/ro/a/in/x": b""}, ROOT, W, path("/w/ro", "read"), path("/w/ro/a/in", "write"))
    assert Bind(b"/w/ro/a", b"/w/ro/a", True) not in apart.steps  # nobody can rename it anyway


def test_scoped_views_have_the_links_of_the_host() -> None:
    plan = compiled({"/w/x": b"", "/L": "w"}, special("minimal", "read"), path("/L", "write"), cwd="/L")
    assert plan.steps[:2] == (Tmpfs(b"/"), PrivateDevices())
    binds = [step for step in plan.steps if isinstance(step, Bind)]
    assert binds == [Bind(b"/etc", b"/etc"), Bind(b"/usr", b"/usr"), Bind(b"/w", b"/w", True)]
    links = [step for step in plan.steps if isinstance(step, Link)]
    assert links == [Link(b"/L", b"w"), Link(b"/bin", b"usr/bin")]
    assert plan.cwd == b"/w"
    assert compiled({"/w": None}, special("minimal", "read"), cwd="/w").cwd == b"/"


def test_root_that_is_denied_is_a_scoped_view() -> None:
    plan = compiled({"/w/x": b""}, special("root", "deny"), ROOT, path("/w", "read"))
    assert plan.steps == (Tmpfs(b"/"), PrivateDevices(), Bind(b"/w", b"/w"))
    assert (plan.access(b"/etc"), plan.access(b"/w/x")) == ("none", "read")


def test_narrowed_root() -> None:
    plan = compiled({"/o/s": b""}, WRITE_ROOT, path("/o", "read"))
    assert plan.steps[:2] == (Bind(b"/", b"/", True), PrivateDevices())
    assert (plan.access(b"/x"), plan.access(b"/o/s"), plan.access(b"/.git")) == ("write", "read", "read")


def test_helpers_have_nothing_of_their_own_to_write_to() -> None:
    plan = compiled({"/w/x": b""}, path("/w", "read"), for_files=True, readable=(b"/usr",), cwd="/w")
    assert plan.steps[-3:] == (ReadOnly(b"/"), ReadOnly(b"/dev"), ReadOnly(b"/proc"))
    assert plan.readable == (b"/etc", b"/usr", b"/w")  # minimal without being asked
    assert plan.cwd == b"/"


def test_what_runs_inside_is_readable_unless_denied() -> None:
    tree = {"/opt/python/bin": None, "/opt/secret": b""}
    plan = compiled(tree, ROOT, path("/opt", "deny"), readable=(b"/opt/python", b"/opt/missing"))
    assert (plan.access(b"/opt/python/bin"), plan.access(b"/opt/secret")) == ("read", "none")
    denied = compiled(tree, ROOT, path("/opt/python", "deny"), readable=(b"/opt/python",))
    assert denied.access(b"/opt/python/bin") == "none"


def test_hidden_is_hidden_whatever_the_profile_says() -> None:
    plan = compiled(
        {"/w/run/sock": b"x"}, ROOT, W, path("/w/run", "write"), hidden=(b"/w/run/sock", b"/none")
    )
    assert plan.access(b"/w/run/sock") == "none"
    assert compiled({"/run/x": b""}, path("/w", "read"), hidden=(b"/run/x",)).denied == ()


def test_what_belongs_to_the_server_is_hidden_where_it_could_be_reached_or_replaced() -> None:
    tree = Tree(SYSTEM | {"/w/sock": b"x"})
    tree.own.append(b"/w/sock")
    for entries, network, access in [
        ([ROOT], "enabled", "none"),
        ([ROOT], "restricted", "read"),
        ([ROOT, W], "restricted", "none"),
        ([path("/w/sock", "write")], "restricted", "none"),
    ]:
        plan = compile_plan(context(*entries, network=network), tree, cwd=b"/")
        assert plan.access(b"/w/sock") == access, (entries, network)


def test_plans_are_about_the_mounts_they_were_made_from() -> None:
    tree = Tree(SYSTEM | {"/w": None})
    before = compile_plan(context(ROOT, W), tree, cwd=b"/")
    assert (before.mounts, before.spread) == (b"", False)
    tree.mounted = Mounts(b"others", True)
    for for_files in (False, True):
        after = compile_plan(context(ROOT, W), tree, cwd=b"/", for_files=for_files)
        assert (after.mounts, after.spread) == (b"others", True)
    assert compile_plan(context(WRITE_ROOT), tree, cwd=b"/", proxy=True).spread


# Links -------------------------------------------------------------------------------------------

LINKS = {"/w/sub/x": b"", "/w/lo": "../o", "/o/s": b"", "/L": "w", "/o/back": "/w", "/w/lf": "sub/x"}


def test_rules_are_about_what_links_lead_to() -> None:
    plan = compiled(LINKS | {"/w/priv/p": b""}, ROOT, path("/L", "write"), path("/w/priv", "deny"))
    assert (plan.writable, plan.access(b"/w/priv/p")) == ((b"/w",), "none")
    through = compiled(LINKS, ROOT, path("/w/lo/s", "deny"))
    assert through.denied == (b"/o/s",)
    other = compiled(LINKS, ROOT, W, path("/L/sub", "deny"))
    assert other.denied == (b"/w/sub",)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (path("/w/lo", "deny"), "deny-read path /w/lo because it crosses writable symlink /w/lo"),
        (path("/w/lo/s", "deny"), "deny-read path /w/lo/s because it crosses writable symlink /w/lo"),
        (path("/w/lf", "read"), "read-only path /w/lf because it crosses writable symlink /w/lf"),
        (
            path("/w/lo/missing", "deny"),
            "deny-read path /w/lo/missing because it crosses writable symlink /w/lo",
        ),
        (path("/o/back/lo", "deny"), "deny-read path /o/back/lo because it crosses writable symlink /w/lo"),
        (pattern("/w/l*"), "deny-read path /w/l[of] because it crosses writable symlink /w/l[of]"),
        # Who could turn the link could have any place made writable for the next command.
        (path("/w/lo", "write"), "writable path /w/lo because it crosses writable symlink /w/lo"),
    ],
)
def test_links_that_could_be_turned(entry: Any, words: str) -> None:
    with pytest.raises(PlanError, match=f"^cannot enforce sandbox {words}$"):
        compiled(LINKS, ROOT, W, entry)


def test_a_link_to_what_can_be_written_anyway() -> None:
    """Turned elsewhere it leads to a root of the same name in which nothing is protected."""
    tree = LINKS | {"/w/li": "sub"}
    with pytest.raises(PlanError, match="writable path /w/li because it crosses writable symlink /w/li"):
        compiled(tree, ROOT, W, path("/w/li", "write"))
    # Of a directory for temporary files nobody expects that, and it allows nothing new.
    plan = compiled(tree, ROOT, W, special("tmpdir", "write"), tmpdir=b"/w/li")
    assert plan.writable == (b"/w",)


@pytest.mark.parametrize("named", [True, False], ids=("named", "by a link"))
def test_temporary_files_go_nowhere_protected(named: bool) -> None:
    """Who can turn TMPDIR into a link, or make it one, chooses where the next command may write."""
    tree = {"/w/.git/hooks/x": b"", "/w/keep/x": b"", "/w/deny/x": b"", "/tmp/t": "/w/.git", "/w/a/x": b""}
    more = (special("tmpdir", "write"), special("slash_tmp", "write"), path("/w/deny", "deny"))
    for place in ("/w/.git", "/w/.git/hooks", "/w/keep", "/w/deny"):
        tree["/tmp/t"] = place
        plan = compiled(
            tree, ROOT, W, path("/w/keep", "read"), *more, tmpdir=os.fsencode(place if named else "/tmp/t")
        )
        assert plan.access(os.fsencode(place)) == ("none" if place == "/w/deny" else "read"), place
        assert plan.writable == (b"/tmp", b"/w")
    plan = compiled(tree, ROOT, W, *more, tmpdir=b"/w/a")
    assert plan.writable == (b"/tmp", b"/w", b"/w/a")
    assert plan.access(b"/w/a/.git") == "read"


def test_the_proc_of_the_host_is_never_part_of_a_view() -> None:
    """Inside there is a fresh one, whatever is named; what is denied in the other cannot be found in it."""
    tree = {"/proc/1/environ": b"", "/proc/self": "1", "/w/x": b"", "/w/link": "/proc/1"}
    for entries in ([path("/proc", "read")], [path("/proc/1", "write")], [path("/w/link", "read")], [ROOT]):
        plan = compiled(tree, *entries, path("/usr", "read"))
        assert not [step for step in plan.steps if isinstance(step, Bind) and covers(b"/proc", step.target)]
    assert Tmpfs(b"/proc", 0) in compiled(tree, ROOT, path("/proc", "deny")).steps
    with pytest.raises(PlanError, match="deny-read path /proc/self/environ: inside there is another /proc"):
        compiled(tree, ROOT, path("/proc/self/environ", "deny"))


TEMPORARY = special("tmpdir", "write")


def test_links_in_a_directory_for_temporary_files_can_be_turned() -> None:
    tree = {"/t/l": "/real", "/real/secret": b"", "/real/x": b""}
    for entry in (path("/t/l/secret", "deny"), path("/t/l", "write"), path("/t/l/x", "read")):
        with pytest.raises(PlanError, match="crosses writable symlink /t/l"):
            compiled(tree, ROOT, TEMPORARY, entry, tmpdir=b"/t")


def test_a_repository_among_temporary_files_is_protected() -> None:
    own = "/t/main/.git/worktrees/W"
    tree = {"/w/.git": f"gitdir: {own}".encode(), f"{own}/commondir": b"../..\n", "/t/main/.git/hooks/x": b""}
    plan = compiled(tree, ROOT, W, TEMPORARY, tmpdir=b"/t")
    assert plan.access(b"/t/main/.git/hooks") == "read"
    assert plan.access(b"/t/main") == "write"


def test_a_match_with_another_name_stays_where_it_is() -> None:
    """The pattern finds a link; if what it leads to could be moved, the next plan would find nothing."""
    tree = {"/ro/m.env": "/w/x/deep/priv", "/w/x/deep/priv": b"", "/w/y/direct.env": b""}
    plan = compiled(tree, ROOT, W, pattern("/ro/*.env"), pattern("/w/*/*.env"))
    bound = [step.target for step in plan.steps if isinstance(step, Bind) and step.writable]
    assert {b"/w/x", b"/w/x/deep"} <= set(bound)
    assert b"/w/y" not in bound


def test_what_is_named_keeps_its_place_though_a_pattern_fits_it() -> None:
    tree = {"/w/a/prod.env": b""}
    for named in ("read", "deny"):
        plan = compiled(tree, ROOT, W, path("/w/a/prod.env", named), pattern("/w/**/*.env"))
        assert Bind(b"/w/a", b"/w/a", writable=True) in plan.steps
        assert plan.access(b"/w/a/prod.env") == "none"


def test_where_nobody_can_make_something_nothing_else_takes_the_place() -> None:
    tree = Tree(SYSTEM | {"/w/d/x": b""})
    tree.makers[b"/w/d"] = "nobody"
    plan = compile_plan(context(ROOT, W, path("/w/d/cfg", "read")), tree, cwd=b"/")
    assert Bind(b"/w/d", b"/w/d", writable=True) in plan.steps


def test_what_cannot_be_looked_at_now_may_be_seen_later() -> None:
    class Unseen(Tree):
        def look(self, path: bytes) -> Look:
            return Look("missing", unseen=True) if path == b"/w/d/sec" else super().look(path)

    for access in ("deny", "read"):
        for for_files in (True, False):
            with pytest.raises(PlanError, match="the mode of /w/d forbids to look"):
                compile_plan(
                    context(ROOT, W, path("/w/d/sec", access)),
                    Unseen(SYSTEM | {"/w/d/x": b""}),
                    cwd=b"/",
                    for_files=for_files,
                )


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"/w/.git": b"gitdir: l/repo.git", "/w/l": "/ro", "/ro/repo.git/x": b""}, "writable symlink /w/l"),
        ({"/w/.git": b"gitdir: l/repo.git", "/w/l": "/gone"}, "writable symlink /w/l"),
        ({"/w/.git": b"gitdir: sub/../../ro/r", "/w/sub/x": b"", "/ro/r/x": b""}, "leads back"),
        (
            {
                "/w/.git": b"gitdir: wt",
                "/w/wt/commondir": b"../l/repo.git",
                "/w/l": "/ro",
                "/ro/repo.git/x": b"",
            },
            "writable symlink /w/l",
        ),
    ],
)
def test_ways_to_a_repository_that_could_be_turned(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        compiled(tree, ROOT, W)


def test_a_repository_with_a_common_one() -> None:
    plan = compiled({"/w/.git/commondir": b"../store\n", "/w/store/hooks/x": b""}, ROOT, W)
    assert plan.access(b"/w/store/hooks") == "read"


def test_what_the_server_runs_is_kept_unless_it_is_named() -> None:
    tree = {"/w/.venv/lib/m.py": b"", "/w/src/x": b""}
    plan = compiled(tree, ROOT, W, kept=[b"/w/.venv", b"/usr"])
    assert (plan.access(b"/w/.venv/lib"), plan.access(b"/w/src")) == ("read", "write")
    named = compiled(tree, ROOT, W, path("/w/.venv", "write"), kept=[b"/w/.venv"])
    assert named.access(b"/w/.venv/lib") == "write"


def test_temporary_files_in_what_is_kept_twice() -> None:
    tree = {"/w/.git/hooks/x": b"", "/w/.git/HEAD": b"x"}
    plan = compiled(tree, ROOT, W, path("/w/.git/hooks", "read"), TEMPORARY, tmpdir=b"/w/.git/hooks")
    assert plan.access(b"/w/.git/hooks") == "read"


def test_a_subpath_with_a_nul_is_refused() -> None:
    with pytest.raises(PlanError, match="NUL"):
        compiled({}, ROOT, special("project_roots", "write", subpath="a\0b"), workspaceRoots=["file:///w"])


def test_everything_is_no_place_for_temporary_files() -> None:
    with pytest.raises(PlanError, match="TMPDIR is /"):
        compiled({}, ROOT, special("tmpdir", "write"), tmpdir=b"/")


def test_metadata_that_is_a_link() -> None:
    for leads_to in ("sub", "../o", "nowhere"):
        with pytest.raises(
            PlanError, match=r"read-only path /w/\.git because it crosses writable symlink /w/\.git"
        ):
            compiled(LINKS | {"/w/.git": leads_to}, ROOT, W)


def test_loops() -> None:
    with pytest.raises(PlanError, match="too many symbolic links on the way to /a"):
        compiled({"/a": "b", "/b": "a"}, ROOT, path("/a", "deny"))


def test_parents_in_links_are_parents_of_what_is_there() -> None:
    tree = {"/deep/er/x": b"", "/link": "deep/er", "/up": "link/../er/x"}
    assert compiled(tree, ROOT, path("/up", "deny")).denied == (b"/deep/er/x",)


# What was looked at ------------------------------------------------------------------------------


def test_a_plan_remembers_which_files_it_is_about() -> None:
    tree = Tree(SYSTEM | {"/w/.git/x": b"", "/w/.env": b"x"})
    profile = context(ROOT, W, path("/w/.env", "deny"))
    plan = compile_plan(profile, tree, cwd=b"/")
    assert [seen.path for seen in plan.seen] == [b"/w", b"/w/.env", b"/w/.git"]
    moved = Tree({})
    moved.nodes = {name: tree.nodes[name] for name in reversed(tree.nodes)}  # other numbers for all of them
    other = compile_plan(profile, moved, cwd=b"/")
    assert (other.steps, other != plan) == (plan.steps, True)


# The rules, said as simply as possible --------------------------------------------------------------

NAMES = ("a", "b", ".git", ".codex")
PLACES = [
    "/" + "/".join(parts)
    for parts in [
        *((first,) for first in NAMES),
        *((first, second) for first in NAMES for second in NAMES),
        *((first, second, third) for first in NAMES for second in NAMES for third in ("a", ".git")),
    ]
]
trees = st.dictionaries(st.sampled_from(PLACES), st.sampled_from([None, b"content"]), max_size=14)
accesses = st.sampled_from(["read", "write", "deny"])
rules = st.lists(st.tuples(st.sampled_from(["/", *PLACES]), accesses), max_size=7)


def sane(nodes: dict[str, Any]) -> dict[str, Any]:
    """Nothing is below a file."""
    return {
        name: value
        for name, value in nodes.items()
        if not any(name.startswith(other + "/") and nodes[other] is not None for other in nodes)
    }


def oracle(tree: Tree, entries: list[tuple[bytes, str]], place: bytes) -> str:
    """Sections 3.2 and 3.4 for something that exists."""
    effective: dict[bytes, str] = {}
    for name, access in entries:
        if name in tree.nodes:
            strongest = max([effective.get(name, "read"), access], key=["read", "write", "deny"].index)
            effective[name] = strongest
    nearest = max((name for name in effective if covers(name, place)), key=depth, default=None)
    if nearest is None or effective[nearest] == "deny":
        return "none"
    if effective[nearest] == "read":
        return "read"
    roots = [name for name, access in effective.items() if access == "write" and tree.nodes[name] is None]
    protected = [os.path.join(root, name) for root in roots for name in PROTECTED_NAMES]
    for root in roots:
        if any(covers(other, root) for other in protected):
            continue
        for name in PROTECTED_NAMES:
            metadata = os.path.join(root, name)
            named = (metadata, "write") in entries
            if covers(metadata, place) and depth(nearest) < depth(metadata) and not named:
                return "read"
    return "write"


@given(trees, rules)
def test_a_plan_allows_what_the_rules_allow(nodes: dict[str, Any], chosen: list[tuple[str, str]]) -> None:
    tree = Tree(sane(nodes))
    entries = [(os.fsencode(name), access) for name, access in chosen]
    profile = context(*(path(name, access) for name, access in entries))
    try:
        plan = compile_plan(profile, tree, cwd=b"/")
    except PlanError as error:
        assert "is not a directory" in str(error)  # noqa: PT017  # the one refusal there can be without links
        return
    for place in tree.nodes:
        assert plan.access(place) == oracle(tree, entries, place), (place, str(plan))
    covered = [*plan.readable, *plan.writable, *plan.read_only, *plan.denied]
    assert len(covered) == len(set(covered))


@given(trees, rules, st.permutations(range(7)))
def test_the_order_of_entries_is_irrelevant(
    nodes: dict[str, Any], chosen: list[tuple[str, str]], order: list[int]
) -> None:
    tree = Tree(sane(nodes))
    entries = [path(name, access) for name, access in chosen]
    shuffled = [entries[index] for index in order if index < len(entries)]
    assert _plan_or_words(entries, tree) == _plan_or_words(shuffled, tree)


def _plan_or_words(entries: list[Any], tree: Tree) -> Plan | str:
    try:
        return compile_plan(context(*entries), tree, cwd=b"/")
    except PlanError as error:
        return type(error).__name__


@given(trees, rules)
def test_a_deeper_step_never_comes_before_a_shallower_one_that_would_cover_it(
    nodes: dict[str, Any], chosen: list[tuple[str, str]]
) -> None:
    plan = _plan_or_words([path(name, access) for name, access in chosen], Tree(sane(nodes)))
    if isinstance(plan, str):
        return
    placed: list[bytes] = []
    for step in plan.steps:
        if isinstance(step, Bind | Tmpfs | EmptyFile):
            assert not any(covers(step.target, before) and step.target != before for before in placed)
            placed.append(step.target)
