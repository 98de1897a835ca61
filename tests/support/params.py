"""Params of every method: a good example, and for each field what is wrong with it."""

from __future__ import annotations

from typing import Any

__all__ = ["BAD", "GOOD", "POLICY", "SANDBOX", "START"]

START = {"processId": "p", "argv": ["true"], "cwd": "file:///", "env": {}, "tty": False}
POLICY = {"inherit": "all", "ignoreDefaultExcludes": True, "exclude": [], "set": {}, "includeOnly": []}
SANDBOX = {"permissions": {"type": "disabled"}, "windowsSandboxLevel": "disabled"}
EXEC = {"processId": "p", "argv": ["true"], "cwd": "/", "env": {}, "tty": False}

GOOD: dict[str, dict[str, Any]] = {
    "initialize": {"clientName": "x"},
    "process/start": START,
    "process/read": {"processId": "p"},
    "process/write": {"processId": "p", "chunk": ""},
    "process/signal": {"processId": "p", "signal": "interrupt"},
    "process/terminate": {"processId": "p"},
    "process/closeStdin": {"processId": "p"},
    "process/resize": {"processId": "p", "rows": 1, "cols": 1},
    "process/wait": {"processId": "p"},
    "process/snapshot": {"processId": "p"},
    "command/exec": EXEC,
    "command/exec/write": {"processId": "p", "chunk": ""},
    "command/exec/terminate": {"processId": "p"},
}
"""The fields here are the required ones."""

NOT_TEXT: list[Any] = [None, 1, True, [], {}]
NOT_U64: list[Any] = [-1, 0.5, 1.0, "1", True, [], 2**64, 10**30]
NOT_WORDS: list[Any] = [None, "true", {}, 5, [1], ["a", None]]
NOT_VARIABLES: list[Any] = [None, [], "x", {"A": 1}, {"A": None}]

BAD: dict[str, dict[str, list[Any]]] = {
    "initialize": {
        "clientName": NOT_TEXT,
        "resumeSessionId": [1, [], {}, True],
        "lifecycleEvents": ["yes", 1],
        "extensions": ["yes", 1],
        "binaryOutput": ["yes", 1],
    },
    "process/start": {
        "processId": NOT_TEXT,
        "argv": NOT_WORDS,
        "cwd": NOT_TEXT,
        "env": NOT_VARIABLES,
        "tty": [None, 0, "false", []],
        "pipeStdin": [None, 1, "true"],
        "arg0": [1, [], {}],
        "envPolicy": [
            1,
            [],
            {},
            *({name: value for name, value in POLICY.items() if name != missing} for missing in POLICY),
            {**POLICY, "inherit": "some"},
            {**POLICY, "inherit": None},
            {**POLICY, "ignoreDefaultExcludes": None},
            {**POLICY, "exclude": [1]},
            {**POLICY, "set": {"A": 1}},
            {**POLICY, "includeOnly": None},
        ],
        "metadata": [1, [], {"threadId": 1}, {"threadId": "no uuid"}, {"toolCallId": 1}],
        "shellSnapshot": [1, {}, {"scopeId": "s"}, {"scopeId": "s", "shell": {"name": "bash"}}],
        "sandbox": [1, {}, {"permissions": {}}, {**SANDBOX, "windowsSandboxLevel": "high"}],
        "enforceManagedNetwork": [None, "no"],
        "managedNetwork": [
            1,
            [],
            {"loopbackPorts": "x", "allowLocalBinding": 5},
            *({"loopbackPorts": bad} for bad in (None, {}, ["1"], [-1], [65536], [1.5], [None])),
            *({"allowLocalBinding": bad} for bad in (None, 0, "x")),
        ],
        "networkProxy": [1, []],
        "ptySize": [1, {}, {"rows": 1}, {"rows": -1, "cols": 1}, {"rows": 65536, "cols": 1}],
        "spawn": [1, "other", "Direct"],
    },
    "process/read": {"processId": NOT_TEXT, "afterSeq": NOT_U64, "maxBytes": NOT_U64, "waitMs": NOT_U64},
    "process/write": {"processId": NOT_TEXT, "chunk": NOT_TEXT, "writeId": [1, [], True]},
    "process/signal": {"processId": NOT_TEXT, "signal": NOT_TEXT},
    "process/terminate": {
        "processId": NOT_TEXT,
        "mode": [
            "force",
            1,
            {},
            {"type": "kind"},
            {"type": None},
            {"type": "graceful"},
            {"type": "graceful", "timeoutMs": None},
            {"type": "graceful", "timeoutMs": -1},
            {"type": "graceful", "timeoutMs": "1"},
            {"type": "graceful", "timeoutMs": 2**64},
        ],
    },
    "process/closeStdin": {"processId": NOT_TEXT, "writeId": [1, []]},
    "process/resize": {
        "processId": NOT_TEXT,
        "rows": [None, -1, "1", 1.5],
        "cols": [None, -1, "1", 1.5],
    },
    "process/wait": {"processId": NOT_TEXT, "waitMs": NOT_U64, "until": ["started", 1, []]},
    "process/snapshot": {"processId": NOT_TEXT},
    "command/exec": {
        "processId": NOT_TEXT,
        "argv": NOT_WORDS,
        "cwd": NOT_TEXT,
        "env": NOT_VARIABLES,
        "tty": [None, 0, "false", []],
        "outputBytesCap": NOT_U64,
        "arg0": [1, [], {}],
    },
    "command/exec/write": {"processId": NOT_TEXT, "chunk": NOT_TEXT},
    "command/exec/terminate": {"processId": NOT_TEXT},
}
"""For each field, values of which each must be refused with -32602."""
