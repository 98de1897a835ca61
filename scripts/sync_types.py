"""Write src/exec_server/sync.pyi: what type checkers know of the blocking twin.

    python scripts/sync_types.py            # write it
    python scripts/sync_types.py --print    # only show it

The twin has no code of its own for any of these methods, so their types are made of the asynchronous ones:
`services.py`, and what `Environment` and `RemoteProcess` have beyond it. tests/test_sync_types.py fails when
the file is not what this makes.
"""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "exec_server"
STUB = PACKAGE / "sync.pyi"

SERVICES = "services.py"
ENVIRONMENT = "environments/environment.py"
SESSION = "client/session.py"


class Part(NamedTuple):
    """Where members of a twin come from: a class, and which of its members (all, if none are named)."""

    file: str
    name: str
    members: tuple[str, ...] = ()


TWINS: dict[str, tuple[str, list[Part]]] = {
    "HttpBody": ("Blocking", [Part(SERVICES, "HttpBody")]),
    "Http": ("Blocking", [Part(SERVICES, "Http")]),
    "Files": ("Blocking", [Part(SERVICES, "Files"), Part("client/files.py", "RemoteFiles", ("under",))]),
    "Process": (
        "Blocking",
        [Part(SERVICES, "Process"), Part("client/process_events.py", "ProcessEvents", ("exit_code",))],
    ),
    "Processes": ("Blocking", [Part(SERVICES, "Processes")]),
    "Environment": (
        "Processes",
        [
            Part(SERVICES, "Environment"),
            Part(ENVIRONMENT, "Environment", ("address", "read_config")),
            Part(SESSION, "Session", ("session_id", "has", "state", "connected", "fail_fast", "call")),
        ],
    ),
}
"""The classes of the stub, with their bases."""

SAME = {
    "AsyncIterator": "Items",
    "AsyncIterable": "Iterable",
    "AbstractAsyncContextManager": "AbstractContextManager",
    "RemoteFiles": "Files",
    "Connecting": "Environment",
}
"""What a type is called on this side."""

SPECIAL = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__"}

ATTRIBUTES = {"address": "str", "session_id": "str"}
"""Members that are set in an `__init__`, without an annotation."""

OPTIONS = {"run": ("start", {"stdin"})}
"""Methods whose `**options` are the keywords of another, but for some that they give themselves."""

HEAD = '''"""What type checkers know of the blocking twin. Made by scripts/sync_types.py; do not edit."""

import builtins
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar
'''

BLOCKING = """
T = TypeVar("T")

class Blocking:
    def __init__(self, of: Any) -> None: ...

class Items(Blocking, Iterator[T]):
    def __iter__(self) -> Self: ...
    def __next__(self) -> T: ...
    def close(self) -> None: ...
"""


class Module:
    """A source file: its classes, and where every name in it comes from."""

    def __init__(self, path: str) -> None:
        self._package = ["exec_server", *Path(path).parts[:-1]]
        self._name = [*self._package, Path(path).stem]
        tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self._origins: dict[str, tuple[str, str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self._origins[alias.asname or alias.name] = (self._absolute(node), alias.name)
        for statement in tree.body:
            for name in _defined(statement):
                self._origins[name] = (".".join(self._name), name)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        above = self._package[: len(self._package) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])

    def origin(self, name: str) -> tuple[str, str] | None:
        """Module and name; None for what needs no import."""
        if name in vars(builtins):
            return None
        if name not in self._origins:
            raise SystemExit(f"{'/'.join(self._name)}: nobody knows where {name} comes from")
        return self._origins[name]


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []


class Renaming(ast.NodeTransformer):
    """Types of that side as types of this side; gathers what has to be imported for them."""

    def __init__(self, module: Module, imports: set[tuple[str, str]]) -> None:
        self._module = module
        self._imports = imports

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id == "list":  # two of the classes have a method of that name
            return ast.parse("builtins.list", mode="eval").body
        name = SAME.get(node.id, node.id)
        if name in ("Iterator", "Iterable"):
            self._imports.add(("collections.abc", name))
        elif name not in (*TWINS, "Items", "T", "AbstractContextManager", "Any"):
            origin = self._module.origin(name)
            if origin is not None:
                self._imports.add(origin)
        return ast.Name(name)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """`AsyncIterable[bytes] | Iterable[bytes]` is one type here."""
        self.generic_visit(node)
        return node.left if ast.dump(node.left) == ast.dump(node.right) else node


class Stub:
    """The file, as it grows."""

    def __init__(self) -> None:
        self._modules: dict[str, Module] = {}
        self._imports: set[tuple[str, str]] = set()

    def text(self) -> str:
        body = "".join(self._twin(name, base, parts) for name, (base, parts) in TWINS.items())
        body += self._connect()
        imports = "".join(f"from {_relative(module)} import {name}\n" for module, name in self._imports)
        exported = ", ".join(f'"{name}"' for name in sorted(["Blocking", "Items", "connect", *TWINS]))
        return _tidied(f"{HEAD}{imports}\n__all__ = [{exported}]\n{BLOCKING}{body}")

    def _module(self, path: str) -> Module:
        if path not in self._modules:
            self._modules[path] = Module(path)
        return self._modules[path]

    def _twin(self, name: str, base: str, parts: list[Part]) -> str:
        lines = [f"\nclass {name}({base}):\n"]
        for part in parts:
            module = self._module(part.file)
            found = {
                node.name: node
                for node in module.classes[part.name].body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            for member in part.members or found:
                if member in ATTRIBUTES:
                    lines.append(f"    {member}: {ATTRIBUTES[member]}\n")
                else:
                    lines.append(self._method(found[member], module, found))
        return "".join(lines)

    def _method(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        module: Module,
        siblings: dict[str, ast.FunctionDef | ast.AsyncFunctionDef],
    ) -> str:
        renaming = Renaming(module, self._imports)
        arguments = node.args
        if node.name in OPTIONS:
            other, given = OPTIONS[node.name]
            theirs = siblings[other].args
            arguments.kwarg = None
            for argument, default in zip(theirs.kwonlyargs, theirs.kw_defaults, strict=True):
                if argument.arg not in given:
                    arguments.kwonlyargs.append(argument)
                    arguments.kw_defaults.append(default)
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        assert node.returns is not None
        returns = renaming.visit(node.returns)
        if "contextmanager" in decorators:
            returns = ast.Subscript(ast.Name("AbstractContextManager"), returns.slice)
        made = ast.FunctionDef(
            name=SPECIAL.get(node.name, node.name),
            args=renaming.visit(arguments),
            body=[ast.Expr(ast.Constant(...))],
            decorator_list=[ast.Name("property")] if decorators & {"property", "cached_property"} else [],
            returns=returns,
        )
        text = ast.unparse(ast.fix_missing_locations(made))
        return "".join(f"    {line}\n" for line in text.splitlines())

    def _connect(self) -> str:
        module = self._module("environments/connect.py")
        text = self._method(module.functions["connect"], module, {})
        return "\n" + "".join(line.removeprefix("    ") for line in text.splitlines(keepends=True))


def _relative(module: str) -> str:
    return module.removeprefix("exec_server") if module.startswith("exec_server.") else module


def _tidied(text: str) -> str:
    """As the linter and the formatter of this project want it."""
    ruff = [sys.executable, "-m", "ruff"]
    for words in (["check", "--select", "I", "--fix-only"], ["format"]):
        command = [*ruff, *words, "--quiet", "--stdin-filename", str(STUB), "-"]
        text = subprocess.run(
            command, input=text, capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
    return text


def main() -> None:
    text = Stub().text()
    if "--print" in sys.argv[1:]:
        sys.stdout.write(text)
    else:
        STUB.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
