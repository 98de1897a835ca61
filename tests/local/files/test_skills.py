"""What the user has installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exec_server.local.files.skills import WARNING, discover_user
from exec_server.wire.capabilities import UserResult

PLUGIN = "plugins/cache/market/thing/1.0.0"
MANIFEST = ".codex-plugin/plugin.json"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "user").mkdir()
    return tmp_path / "home"


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def skill(about: str) -> str:
    return f"---\n{about}\n---\nbody\n"


def found(home: Path) -> UserResult:
    return discover_user(os.fsencode(home), os.fsencode(home.parent / "user"))


def test_nothing(home: Path) -> None:
    assert found(home) == UserResult([], [], [])
    assert discover_user(b"/nonexistent", None) == UserResult([], [], [])


def test_skills_of_both_folders(home: Path) -> None:
    put(home / "skills" / "b" / "SKILL.md", skill("name: bee\ndescription: >\n  two\n  lines"))
    put(
        home / "skills" / "a" / "SKILL.md",
        skill('name: "a"\ndescription: d\nmetadata:\n  short-description: short'),
    )
    put(home.parent / "user" / ".agents" / "skills" / "c" / "SKILL.md", skill("description: by its folder"))
    result = found(home)
    assert [
        (one.name, one.description, one.short_description, one.discovery_root.id) for one in result.skills
    ] == [
        ("a", "d", "short", "codex-home-skills"),
        ("bee", "two lines", None, "codex-home-skills"),
        ("c", "by its folder", None, "user-agent-skills"),
    ]
    assert result.skills[0].path == (home / "skills" / "a" / "SKILL.md").as_uri()
    assert result.warnings == []


@pytest.mark.parametrize(
    "text",
    [
        "no front matter",
        skill("name: x"),
        skill("description: ''"),
        skill(f"name: {'n' * 65}\ndescription: d"),
        skill("name: [unclosed"),
        "---\nname: x\ndescription: d\n",
        "\n" + skill("name: x\ndescription: d"),
        skill("- a\n- list"),
    ],
)
def test_skills_that_cannot_be_understood(home: Path, text: str) -> None:
    put(home / "skills" / "bad" / "SKILL.md", text)
    put(home / "skills" / "good" / "SKILL.md", skill("name: good\ndescription: d"))
    result = found(home)
    assert [one.name for one in result.skills] == ["good"]
    assert result.warnings == [WARNING]


def test_what_people_write_by_hand(home: Path) -> None:
    put(home / "skills" / "a" / "SKILL.md", skill("name: a\ndescription: Use this: now"))
    put(home / "skills" / "b" / "SKILL.md", skill("name:\tb\ndescription:\td"))
    put(home / "skills" / "c" / "SKILL.md", "---\r\nname: c\r\ndescription: d\r\n---\r\n")
    put(home / "skills" / "d" / "SKILL.md", "---\nname: d\ndescription: e\n---")
    assert [(one.name, one.description) for one in found(home).skills] == [
        ("a", "Use this: now"),
        ("b", "d"),
        ("c", "d"),
        ("d", "e"),
    ]


def test_metadata(home: Path) -> None:
    put(home / "skills" / "a" / "SKILL.md", skill("name: a\ndescription: d"))
    put(
        home / "skills" / "a" / "agents" / "openai.yaml",
        "policy:\n  allow_implicit_invocation: false\n  products: [codex]\n"
        "dependencies:\n  tools:\n    - {type: mcp, value: v, oauth_callback_port: 80}\n    - {type: half}\n",
    )
    put(home / "skills" / "b" / "SKILL.md", skill("name: b\ndescription: d"))
    put(home / "skills" / "b" / "agents" / "openai.yaml", "policy: [broken")
    one, two = found(home).skills
    assert one.policy == {"allowImplicitInvocation": False, "products": ["codex"]}
    assert one.dependencies is not None
    assert [(tool["type"], tool["oauthCallbackPort"]) for tool in one.dependencies["tools"]] == [("mcp", 80)]
    assert (two.policy, two.dependencies) == (None, None)


def test_a_plugin(home: Path) -> None:
    put(
        home / PLUGIN / MANIFEST,
        '{"name": "thing", "interface": {"displayName": "Thing!"}, "mcpServers": {"a": 1}}',
    )
    put(home / PLUGIN / "skills" / "s" / "SKILL.md", skill("name: s\ndescription: d"))
    (plugin,) = found(home).plugins
    assert (plugin.id, plugin.display_name, plugin.version) == ("thing@market", "Thing!", "1.0.0")
    assert plugin.root == (home / PLUGIN).as_uri()
    assert [one.name for one in plugin.skills] == ["thing:s"]
    assert plugin.files.mcp_config is not None
    assert plugin.files.mcp_config.contents == '{"a":1}'


@pytest.mark.parametrize(
    ("versions", "newest"),
    [
        (["1.9.0", "1.10.0"], "1.10.0"),
        (["local", "2.0.0"], "local"),
        (["1.0.0-rc1", "1.0.0"], "1.0.0"),
        (["1.0.0-rc1", "1.0.0-rc2"], "1.0.0-rc2"),
        (["abc", "zzz", "1.0.0"], "zzz"),
    ],
)
def test_the_newest_version(home: Path, versions: list[str], newest: str) -> None:
    for version in versions:
        put(home / "plugins" / "cache" / "m" / "p" / version / MANIFEST, "{}")
    assert [plugin.version for plugin in found(home).plugins] == [newest]


@pytest.mark.parametrize("manifest", ["{", "[]", '{"name": 5}', '{"interface": {"displayName": 5}}'])
def test_plugins_that_cannot_be_understood(home: Path, manifest: str) -> None:
    put(home / PLUGIN / MANIFEST, manifest)
    assert found(home) == UserResult([], [], [WARNING])


def test_plugins_that_are_not_whole(home: Path) -> None:
    put(home / PLUGIN / MANIFEST, '{"mcpServers": "./missing", "apps": "elsewhere"}')
    result = found(home)
    assert [plugin.id for plugin in result.plugins] == ["thing@market"]
    assert result.warnings == [WARNING]
    put(home / "plugins" / "cache" / "bad name" / "p" / "1" / MANIFEST, "{}")
    assert len(found(home).plugins) == 1


def test_the_nearest_manifest_names_a_skill(home: Path) -> None:
    put(home / "skills" / "outer" / MANIFEST, '{"name": "outer"}')
    put(home / "skills" / "outer" / "inner" / MANIFEST, "{}")
    put(home / "skills" / "outer" / "a" / "SKILL.md", skill("name: a\ndescription: d"))
    put(home / "skills" / "outer" / "inner" / "b" / "SKILL.md", skill("name: b\ndescription: d"))
    assert [one.name for one in found(home).skills] == ["outer:a", "inner:b"]
