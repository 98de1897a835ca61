"""What a model is told it may say is what we understand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Struct

from exec_server.agent.exec import ExecCommand, ToolError, WriteStdin, arguments
from exec_server.agent.unified_tools import exec_command_tool, write_stdin_tool

EXAMPLES = {"string": "x", "integer": 5, "boolean": True}


@pytest.mark.parametrize(
    ("tool", "kind"),
    [
        (exec_command_tool(), ExecCommand),
        (exec_command_tool(["here", "there"], approvals=True), ExecCommand),
        (write_stdin_tool(), WriteStdin),
    ],
)
def test_every_parameter_is_understood(tool: dict[str, Any], kind: type[Struct]) -> None:
    properties = tool["parameters"]["properties"]
    assert set(properties) <= set(kind.__struct_fields__)
    call = {name: EXAMPLES[schema["type"]] for name, schema in properties.items()}
    read = arguments(json.dumps(call), kind)
    assert {name: getattr(read, name) for name in call} == call
    for name in tool["parameters"]["required"]:
        with pytest.raises(ToolError):
            arguments(json.dumps({key: value for key, value in call.items() if key != name}), kind)


def test_a_machine_is_offered_only_if_there_is_a_choice() -> None:
    assert "environment_id" not in exec_command_tool(["here"])["parameters"]["properties"]
    offered = exec_command_tool(["here", "there"])["parameters"]["properties"]["environment_id"]
    assert offered["enum"] == ["here", "there"]
    assert "justification" not in exec_command_tool()["parameters"]["properties"]
