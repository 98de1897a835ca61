"""`python -m benchmarks.download URL REMOTE LOCAL`: one download in a process of its own, and its peak."""

import asyncio
import json
import sys
import time
from pathlib import Path

from exec_server import connect


async def main(url: str, remote: str, local: str) -> None:
    """Download, and print what it took."""
    async with connect(url) as client:
        started = time.perf_counter()
        await client.files.download(remote, local, verify=False)
        seconds = time.perf_counter() - started
    # Not ru_maxrss, which begins with what the process had that this one was started from.
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    print(json.dumps({"seconds": seconds, "peak": kilobytes * 1024}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
