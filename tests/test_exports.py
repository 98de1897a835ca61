"""What `import exec_server` offers: every name is there, and every error a caller may have to catch."""

from __future__ import annotations

import errno
import importlib
import inspect
import pkgutil
import pydoc
import subprocess
import sys

import pytest

import exec_server
from exec_server.agent import thread
from exec_server.client import errors
from exec_server.environments import manager, roots


def test_every_name_is_there() -> None:
    missing = [name for name in exec_server.__all__ if not hasattr(exec_server, name)]
    assert missing == []
    assert sorted(exec_server.__all__) == sorted(set(exec_server.__all__))


def test_environments_and_threads_have_their_names_here() -> None:
    assert exec_server.EnvironmentManager is manager.EnvironmentManager
    assert exec_server.SelectedRoot is roots.SelectedRoot
    assert exec_server.Threads is thread.Threads


LAZY = """
import sys, exec_server
print(sorted(name for name in sys.modules if name.startswith("exec_server")), "asyncio" in sys.modules)
exec_server.SelectedRoot
print("exec_server.agent.thread" in sys.modules)
"""


def test_nothing_is_imported_before_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAZY], capture_output=True, text=True, timeout=40, check=True
    )
    assert done.stdout.splitlines() == ["['exec_server', 'exec_server.version'] False", "False"]


def test_every_name_is_listed_before_it_is_used() -> None:
    program = "import exec_server; print(*(set(exec_server.__all__) - set(dir(exec_server))))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("\n", "")


@pytest.mark.parametrize("room", ["agent", "client", "environments", "events", "wire"])
def test_help_is_there(room: str) -> None:
    """`help()` looks up the types of every field, also those that are imported for type checkers only."""
    package = importlib.import_module(f"exec_server.{room}")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        assert pydoc.render_doc(importlib.import_module(module.name))


def test_every_error_can_be_caught_by_its_name() -> None:
    raised = {name for name in errors.__all__ if inspect.isclass(getattr(errors, name))}
    assert raised <= set(exec_server.__all__)


def test_a_lost_connection_is_an_error_of_the_system_but_not_of_our_own_output() -> None:
    for kind in (exec_server.ConnectionLost, exec_server.Recovering, exec_server.SessionLost):
        error = kind("gone")
        assert isinstance(error, ConnectionError)
        assert not isinstance(error, BrokenPipeError)
        assert (error.errno, str(error)) == (errno.EPIPE, "gone")
    assert exec_server.SessionLost("gone", 5.0).slept == 5.0


def test_file_errors_are_the_usual_ones_too() -> None:
    pairs = [
        (exec_server.RemoteFileNotFound, FileNotFoundError),
        (exec_server.RemoteFileExists, FileExistsError),
        (exec_server.RemoteIsADirectory, IsADirectoryError),
        (exec_server.RemoteNotADirectory, NotADirectoryError),
        (exec_server.RemotePermissionDenied, PermissionError),
    ]
    for ours, usual in pairs:
        assert issubclass(ours, usual)
        assert issubclass(ours, exec_server.RemoteFileError)
