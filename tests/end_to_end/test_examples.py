"""What the README names: its whole script, run as it says, and its commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.server import Server
from typer.main import get_command

from dear_tune import Client
from dear_tune.cli.app import create_app
from dear_tune.contract import DEFAULT_THRESHOLD_BYTES, TrialState

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TIMEOUT_S = 120


def named(program: str) -> set[str]:
    """What stands after a program's name in the README's code."""
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", README, re.DOTALL))
    return set(re.findall(rf"(?<![\w-]){program} ([a-z][a-z-]*)", code))


def test_the_whole_script_is_tuned(tmp_path: Path) -> None:
    """The example trains under torchrun with two ranks, and its trials appear on DEAR_TUNE_URL's server."""
    example = re.findall(r"\((engine/examples/\w+\.py)\)", README)[0]
    with Server(f"sqlite:///{tmp_path}/studies.db") as server:
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
                *("--nproc-per-node", "2", str(ROOT / example), "--epochs", "60"),
            ],
            env={**os.environ, "DEAR_TUNE_URL": server.url, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout
        with Client(server.url) as client:
            (study,) = client.studies()
            trials = list(client.trials(study.name))
    assert "epoch 40: loss 0.0" in ended.stdout
    assert "-2x-" in study.name
    assert trials[0].state is TrialState.COMPLETED
    assert trials[0].parameters.threshold_bytes == DEFAULT_THRESHOLD_BYTES


def test_the_readmes_make_targets_exist() -> None:
    """Each `make` target of the README is in the Makefile."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"demo", "test"} <= named("make") <= set(targets)


def test_the_readmes_commands_exist() -> None:
    """Each `dear-tune` command of the README is one."""
    command = get_command(create_app())
    assert {"serve", "studies"} <= named("dear-tune") <= set(command.list_commands(command.make_context("x", ["--"])))
