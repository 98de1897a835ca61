"""`environments.toml`: the same file means the same to the reference and to us, its errors word by word."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from compliance.harness import CLOSED_PORT, CONFIG, Codex
from compliance.model import exec_command
from compliance.server import Server
from exec_server.environments.config import ConfigurationError, load


def entry(**members: str) -> str:
    return "[[environments]]\n" + "".join(f"{name} = {value}\n" for name, value in members.items())


URL = '"ws://127.0.0.1:1"'

WRONG = [
    entry(id='""', url=URL),
    entry(id='" a"', url=URL),
    entry(id='"local"', url=URL),
    entry(id='"nOne"', url=URL),
    entry(id=f'"{"x" * 65}"', url=URL),
    entry(id=f'"{"é" * 33}"', url=URL),
    entry(id='"a.b"', url=URL),
    entry(id='"a"', url=URL, args="[]"),
    entry(id='"a"', url=URL, cwd='"/"'),
    entry(id='"a"', program='"x"', connect_timeout_sec="1"),
    entry(id='"a"', program='"x"', auth_bearer_token='"t"'),
    entry(id='"a"', url='"ws://127.0.0.1:1"', auth_bearer_token='"t\\u0001"'),
    entry(id='"a"', url='"ws://example.test:1"', auth_bearer_token='"t"'),
    entry(id='"a"', url='"http://x"', auth_bearer_token='"t\\u0001"'),
    entry(id='"a"', url=URL, program='"x"', auth_bearer_token='"t\\u0001"'),
    entry(id='"a"'),
    entry(id='"a"', url=URL, program='"x"'),
    entry(id='"a"', url='" "'),
    entry(id='"a"', url='"http://h"'),
    entry(id='"a"', url='"WS://h"'),
    entry(id='"a"', program='" "'),
    entry(id='"a"', url=URL) * 2,
    entry(id='"a"', url=URL) + entry(id='"a"', url='"x"'),
    'default = " "',
    'default = "nope"',
    'default = "local"\ninclude_local = false',
]
"""Files that both must refuse with the same words."""

WRONG_FORM = [
    "x =",
    "foo = 1",
    "environments = 4",
    entry(url=URL),
    entry(id='"a"', url=URL, urll='"x"'),
    entry(id='"a"', url=URL, connect_timeout_sec="-1"),
    entry(id='"a"', url=URL, connect_timeout_sec="inf"),
    entry(id='"a"', url=URL, connect_timeout_sec='"1"'),
    entry(id='"a"', program='"x"', cwd="5"),
    entry(id='"a"', url=URL, skills="5"),
    entry(id='"a"', url=URL, skills="{required = true}"),
]
"""Files of which both must say that they cannot be parsed; the detail after that is each one's own."""

BAD_URLS = ["ws://", "ws:///x", "ws://[::1", "ws://h h"]


def shown(text: str) -> str:
    """A file as the name of a test."""
    return " ".join(text.removeprefix("[[environments]]").split())


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(base_url="http://127.0.0.1:9/v1"))
    return home


def refused_by_codex(binary: Path, home: Path) -> str:
    """The error with which the reference ends before it does anything."""
    done = subprocess.run(
        [binary, "exec", "--skip-git-repo-check", "-C", str(home), "x"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        env={
            "PATH": os.defpath,
            "HOME": str(home),
            "CODEX_HOME": str(home),
            "HTTP_PROXY": CLOSED_PORT,
            "HTTPS_PROXY": CLOSED_PORT,
        },
    )
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    return line.removeprefix("Error: ")


def refused_by_us(home: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(str(home), {})
    return str(caught.value)


@pytest.mark.parametrize("text", WRONG, ids=shown)
def test_the_same_words(reference: Path, home: Path, text: str) -> None:
    (home / "environments.toml").write_text(text)
    assert refused_by_us(home) == refused_by_codex(reference, home)


@pytest.mark.parametrize("text", WRONG_FORM, ids=shown)
def test_the_same_beginning(reference: Path, home: Path, text: str) -> None:
    (home / "environments.toml").write_text(text)
    beginning = f"exec-server protocol error: failed to parse environment config `{home}/environments.toml`: "
    assert refused_by_codex(reference, home).startswith(beginning)
    assert refused_by_us(home).startswith(beginning)


@pytest.mark.parametrize("url", BAD_URLS)
def test_the_same_urls(reference: Path, home: Path, url: str) -> None:
    (home / "environments.toml").write_text(entry(id='"a"', url=f'"{url}"'))
    beginning = f"exec-server protocol error: environment url `{url}` is invalid: "
    assert refused_by_codex(reference, home).startswith(beginning)
    assert refused_by_us(home).startswith(beginning)


def test_a_url_in_the_file(codex: Codex, server: Server) -> None:
    """The reference reaches our server through the very file that we read, although the variable says no."""
    environments = 'default = "box"\n' + entry(id='"box"', url=f'"{server.url}"')
    run = codex.run([exec_command("echo through the file"), "done"], environments=environments, url="none")
    assert run.results[0].output == "through the file\n"
    found = load(str(codex.home), {"CODEX_EXEC_SERVER_URL": "none"})
    assert (found.default, found.ids()) == ("box", ["local", "box"])
