"""The built wheel, in fresh environments: without extras, with the service's, with the engine's."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside the repository, whose packages would otherwise be found first."""
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=Path(sys.prefix))


def succeed(*command: str | Path) -> str:
    """Run a command that must succeed; what it printed."""
    ended = run(*command)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once."""
    folder = tmp_path_factory.mktemp("wheel")
    succeed(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


def installed(wheel: Path, folder: Path, extra: str = "") -> Path:
    """The programs of a fresh environment with the wheel, in the tested versions."""
    succeed(sys.executable, "-m", "venv", folder)
    programs = folder / ("Scripts" if sys.platform == "win32" else "bin")
    pip = (programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    succeed(*pip, "--constraint", ROOT / "constraints.txt", f"{wheel}{extra}")
    return programs


@pytest.fixture(scope="session")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment without extras."""
    return installed(wheel, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def service(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the service."""
    return installed(wheel, tmp_path_factory.mktemp("service"), "[service]")


@pytest.fixture(scope="session")
def engine(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the engine."""
    return installed(wheel, tmp_path_factory.mktemp("engine"), "[engine]")


def missing(programs: Path, *modules: str) -> set[str]:
    """Which of these top-level modules an environment lacks."""
    script = "import sys\nfrom importlib.util import find_spec\nprint(*(m for m in sys.argv[1:] if not find_spec(m)))"
    return set(succeed(programs / "python", "-c", script, *modules).split())


@pytest.mark.parametrize(
    "file",
    [
        "dear_tune/py.typed",
        "dear_engine/__init__.py",
        "dear_engine/py.typed",
        "dear_service/__init__.py",
        "dear_service/py.typed",
        "dear_service/migrations/env.py",
    ],
)
def test_the_wheel_holds_all_three_packages(wheel: Path, file: str) -> None:
    """Each package is in the wheel, with its types, and the service's with its migrations."""
    assert file in zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    """Neither tests nor tools are installed beside the packages."""
    top = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"dear_tune", "dear_engine", "dear_service"}


def test_the_base_brings_no_extra(base: Path) -> None:
    """Without extras, no library of theirs is installed."""
    libraries = {"torch", "fastapi", "sqlalchemy", "numpy", "skopt"}
    assert missing(base, *libraries) == libraries


def test_the_base_imports(base: Path) -> None:
    """The core works without any extra."""
    succeed(base / "python", "-c", "import dear_tune, dear_tune.fusion, dear_tune.testing")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_base_command_runs(base: Path, option: str) -> None:
    """The command is there without any extra."""
    assert "dear-tune" in succeed(base / "dear-tune", option)


@pytest.mark.parametrize(("command", "extra"), [("serve", "service"), ("demo", "engine")])
def test_a_missing_extra_names_the_pip_command(base: Path, command: str, extra: str) -> None:
    """A command whose extra is not installed prints how to install it, and exits with 2."""
    ended = run(base / "dear-tune", command)
    assert ended.returncode == 2
    assert f"pip install 'dear-tune[{extra}]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_service_needs_no_torch(service: Path) -> None:
    """With the extra [service] the service starts up to its help, and torch is not installed."""
    assert "dear-tune serve" in succeed(service / "dear-tune", "serve", "--help")
    assert missing(service, "torch", "fastapi") == {"torch"}


def test_the_engine_needs_no_service(engine: Path) -> None:
    """With the extra [engine] the engine imports, and neither optimizers nor a web framework are installed."""
    succeed(engine / "python", "-c", "import dear_engine")
    assert missing(engine, "torch", "fastapi", "sqlalchemy", "skopt") == {"fastapi", "sqlalchemy", "skopt"}
