"""Helpers for file calls that run without a sandbox: for tests of who serves whom, and how."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exec_server.limits import Limits
from exec_server.local.files.lane import ALONE, Turn
from exec_server.local.process.machine import ProcessMachine
from exec_server.local.process.spawn import Launch, SpawnSpec
from exec_server.local.sandbox.helper_process import Key
from exec_server.local.sandbox.helpers import Helpers
from exec_server.local.sandbox.plan import Plan
from exec_server.testing import ManualLoop

__all__ = ["Pool"]


class Pool:
    """The pool of one server, and which plans it has started helpers by."""

    def __init__(self, launch: Callable[[SpawnSpec], Launch] | None = None, **limits: Any) -> None:
        self.machine = ProcessMachine(ManualLoop(), Limits())
        self.started: list[Plan] = []
        self.launch = launch or (lambda spec: Launch(spec.argv, spec.env, spec.arg0))
        self.helpers = Helpers(self.machine, Limits(**limits), self._prepare)

    def _prepare(self, plan: Plan, spec: SpawnSpec, again: object = None) -> Launch:
        self.started.append(plan)
        return self.launch(spec)

    def call(self, key: Key, method: str, **params: Any) -> Any:
        """Any call; its result."""
        answer = self.helpers.call(key, method, json.dumps(params).encode(), ALONE, repeatable=True)
        return json.loads(answer.result)

    def read(self, key: Key, path: Path, turn: Turn = ALONE, *, repeatable: bool = True) -> bytes:
        params = json.dumps({"path": path.as_uri()}).encode()
        return self.helpers.call(key, "fs/readFile", params, turn, repeatable=repeatable).result

    def pid(self, key: Key) -> int:
        """Of the program that serves a plan."""
        return int(self.call(key, "fs/canonicalize", path="file:///proc/self")["path"].rpartition("/")[2])

    def close(self) -> None:
        self.helpers.close()
        self.machine.close()
