"""`environmentConfig/read`: configuration files of this machine, read in a thread."""

from __future__ import annotations

from typing import Final

from ...local.config import read_environment_config
from ...loop import Pending
from ...wire.config import ConfigReadParams, ConfigReadResult, decode_config_read
from ..connection import Connection
from ..dispatch import Method

__all__ = ["METHODS"]


def read(connection: Connection, params: ConfigReadParams) -> Pending[ConfigReadResult]:
    """May touch slow disks, so it steps aside."""
    return connection.server.files_worker.run(read_environment_config, params)


METHODS: Final = {"environmentConfig/read": Method(decode_config_read, read, "environment config")}
