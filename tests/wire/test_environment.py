"""What a machine says of itself, as JSON."""

from __future__ import annotations

import msgspec

from exec_server.wire.environment import (
    EnvironmentInfo,
    EnvironmentLimits,
    EnvironmentShell,
    EnvironmentStatus,
)


def test_what_other_builds_leave_out_may_be_absent() -> None:
    info = EnvironmentInfo(shell=EnvironmentShell("sh", "/bin/sh"), cwd=None, capabilities={})
    text = msgspec.json.encode(info)
    assert text == b'{"shell":{"name":"sh","path":"/bin/sh"},"cwd":null,"capabilities":{}}'
    assert msgspec.json.decode(text, type=EnvironmentInfo) == info


def test_every_member_has_its_name() -> None:
    info = EnvironmentInfo(
        shell=EnvironmentShell("bash", "/bin/bash"),
        executor_version="1",
        provider_id="sha256:0",
        cwd="file:///",
        user_home_dir="file:///root",
        platform_os="linux",
        prepend_path_dirs=[],
        temporary_directories=[],
        temp_dir="file:///tmp",
        capabilities={"fsWatchMissing": False},
        limits=EnvironmentLimits(None, 1, 2),
    )
    assert msgspec.to_builtins(info) == {
        "shell": {"name": "bash", "path": "/bin/bash"},
        "executorVersion": "1",
        "providerId": "sha256:0",
        "cwd": "file:///",
        "userHomeDir": "file:///root",
        "platformOs": "linux",
        "prependPathDirs": [],
        "temporaryDirectories": [],
        "tempDir": "file:///tmp",
        "capabilities": {"fsWatchMissing": False},
        "limits": {"maxProcesses": None, "retainedOutputBytes": 1, "shutdownGraceMs": 2},
    }


def test_the_status_is_ready() -> None:
    assert msgspec.json.encode(EnvironmentStatus()) == b'{"status":"ready"}'
