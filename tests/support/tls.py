"""A certificate of our own, by the `openssl` command."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

__all__ = ["certificate", "trusting"]


def certificate(directory: Path) -> tuple[Path, Path]:
    """Certificate and key for 127.0.0.1, ::1 and localhost."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.fail("the tests of wss:// need the `openssl` command to make a certificate")
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        [
            openssl,
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1",
            "-keyout",
            str(key),
            "-out",
            str(cert),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )
    return cert, key


def trusting(cert: Path) -> ssl.SSLContext:
    """A client's context that believes this certificate and no other."""
    return ssl.create_default_context(cafile=str(cert))
