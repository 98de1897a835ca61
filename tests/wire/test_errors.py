"""wire/errors.py: errors as they travel."""

from __future__ import annotations

import os

from exec_server.wire import errors


def test_codes() -> None:
    assert errors.invalid_request("x").code == errors.INVALID_REQUEST == -32600
    assert errors.METHOD_NOT_FOUND == -32601
    assert errors.invalid_params("x").code == errors.INVALID_PARAMS == -32602
    assert errors.internal_error("x").code == errors.INTERNAL_ERROR == -32603
    assert errors.NOT_FOUND == -32004
    assert errors.ALREADY_ATTACHED == -32010


def test_an_error_says_what_and_which() -> None:
    error = errors.RpcError(-32600, "no such thing", {"more": 1})
    assert str(error) == "no such thing (-32600)"
    assert error.data == {"more": 1}


def test_operating_system_errors() -> None:
    assert errors.os_error_text(OSError(2, os.strerror(2))) == "No such file or directory (os error 2)"
    assert errors.os_error_text(FileNotFoundError(2, os.strerror(2), "/x")).endswith("(os error 2)")
