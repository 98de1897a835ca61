"""The params of discovery."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.wire.capabilities import CapabilityRoot, decode_roots, decode_user
from exec_server.wire.errors import RpcError


def test_accepted() -> None:
    params = decode_roots({"roots": [{"id": "a", "path": "file:///x/../y", "sandbox": None}]})
    assert params.roots == [CapabilityRoot(id="a", path="file:///y")]
    assert decode_user({"cwd": "file:///C:/x"}).cwd == "file:///C:/x"


@pytest.mark.parametrize(
    ("decode", "params", "message"),
    [
        (decode_roots, {}, "missing field `roots`"),
        (decode_roots, {"roots": {}}, "invalid type: map, expected a sequence"),
        (decode_roots, {"roots": [{"id": "a"}]}, "missing field `path`"),
        (decode_roots, {"roots": [{"path": "file:///"}]}, "missing field `id`"),
        (decode_roots, {"roots": [{"id": "a", "path": "/x"}]}, "invalid URI: relative URL without a base"),
        (decode_user, {}, "missing field `cwd`"),
    ],
)
def test_refused(decode: Any, params: Any, message: str) -> None:
    with pytest.raises(RpcError) as caught:
        decode(params)
    assert (caught.value.code, caught.value.message) == (-32602, message)
