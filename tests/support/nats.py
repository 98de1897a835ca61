"""NATS servers of one's own, that can be killed and come back, with or without what they kept."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from support.wait import eventually

__all__ = ["NatsServer", "free_port"]

COMMAND = os.path.join(os.path.dirname(sys.executable), "nats-server")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class NatsServer:
    """One with JetStream, on a port that it keeps."""

    def __init__(self, folder: Path, *words: str, more: str = "", port: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None
        config = folder / "nats.conf"
        place = json.dumps(str(folder / "store"))
        config.write_text(f'listen: "127.0.0.1:{port or -1}"\njetstream {{ store_dir: {place} }}\n{more}\n')
        self.url = ""
        self._port = port
        self.start()

    def start(self) -> None:
        ports = self._folder / "ports"
        shutil.rmtree(ports, ignore_errors=True)
        ports.mkdir()
        words = [COMMAND, "-c", str(self._folder / "nats.conf"), "--ports_file_dir", str(ports), *self._words]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(lambda: any(file.stat().st_size for file in ports.iterdir()), "the NATS server")
        (file,) = ports.iterdir()
        self.url = json.loads(file.read_text())["nats"][0]
        if self._port is None:
            self._port = int(self.url.rpartition(":")[2])
            config = self._folder / "nats.conf"
            config.write_text(config.read_text().replace("127.0.0.1:-1", f"127.0.0.1:{self._port}"))

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def forget(self) -> None:
        """All that it kept."""
        shutil.rmtree(self._folder / "store")
