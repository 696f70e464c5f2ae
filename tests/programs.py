"""What is asked of compiled programs, in a process of its own: with XLA's optimisations, or for absent hardware."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_script(script: str, *arguments: str, timeout: float = 1500) -> Any:
    """Runs a script at the root of the repository: the JSON value in the last line it prints, or None."""
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout.splitlines()
    return json.loads(printed[-1]) if printed else None
