"""The benchmark itself runs: both sides, one measurement of each kind, checked answers."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SERVER = Path(sys.executable).parent / "exec-server"


def test_a_short_run_against_ourselves(tmp_path: Path) -> None:
    chosen = [word for name in ("call", "file-list", "sandbox-read") for word in ("--only", name)]
    command = [sys.executable, "-m", "benchmarks", "--quick", "--reference", str(SERVER), *chosen]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "results.json").exists()
    assert (tmp_path / "results.svg").exists()
