"""`dear-tune demo`, from start to end, and when it is interrupted."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRIALS = 4
TIMEOUT_S = 180


def demo(folder, *options):
    command = [sys.executable, "-m", "dear_tune", "demo", "--trials", str(TRIALS), *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def left_behind(process, folder) -> list[str]:
    """Other processes that run in a demo's folder, and its namespaces and links."""
    own = re.compile(rf"dear-demo-{process.pid}\b|dear{process.pid}a")
    running = [_command_line(entry, folder) for entry in Path("/proc").glob("[0-9]*") if entry.name != str(process.pid)]
    return [line for line in running if line] + own.findall(_ip("netns", "list")) + own.findall(_ip("link"))


def _command_line(entry: Path, folder: Path) -> str:
    """The command line of a process that runs in a folder, else nothing."""
    try:
        if (entry / "cwd").readlink() == folder:
            return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        pass  # it has just ended, or is none of ours
    return ""


def _ip(*arguments: str) -> str:
    if shutil.which("ip") is None:
        return ""
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False).stdout


def test_from_start_to_end(tmp_path):
    """The demo prints trials, recommendation, accuracy and that losses equal DDP's, keeps the study, and is gone."""
    process = demo(tmp_path, "--database-url", f"sqlite:///{tmp_path}/demo.db")
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert "recommendation" in output
    assert "gain" in output
    assert re.search(r"Test accuracy after \d+ steps: [89]\d\.\d %", output)
    assert "equal to DistributedDataParallel's" in output
    assert (tmp_path / "demo.db").exists()
    assert left_behind(process, tmp_path) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(tmp_path, number, code):
    """Ctrl-C and SIGTERM end the demo at once, without a traceback, a process or a namespace left."""
    process = demo(tmp_path)
    deadline = time.monotonic() + 60
    while not any("dear_engine.demo.train" in line for line in left_behind(process, tmp_path)):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == code, output
    assert "Traceback" not in output
    assert left_behind(process, tmp_path) == []


def test_without_a_shaped_link(tmp_path):
    """On loopback the demo says that there is little to gain."""
    process = demo(tmp_path, "--loopback")
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert "little to gain" in output
    assert left_behind(process, tmp_path) == []
