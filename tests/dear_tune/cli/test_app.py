from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest

from dear_tune.cli import app as app_module
from dear_tune.cli import components, main

Contribute = Callable[..., None]

MODULE = '''
"""The module's own words."""
{imports}
import typer

def greet(name: str = "you") -> None:
    """Greet somebody."""
    print(f"hello, {{name}}")

group = typer.Typer(help="A group.")
group.command()(greet)
group.command("again")(greet)
'''


@pytest.fixture
def contribute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Contribute:
    """A function that installs a component's module and its entry points in the group of the extra [service]."""
    monkeypatch.syspath_prepend(tmp_path)
    package = f"component_{tmp_path.name}".replace("-", "_")

    def write(imports: str = "", **commands: str) -> None:
        (tmp_path / f"{package}").mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "cli.py").write_text(MODULE.format(imports=imports))
        group = "dear_tune.commands.service"
        points = [EntryPoint(name, f"{package}.cli:{attribute}", group) for name, attribute in commands.items()]
        monkeypatch.setattr(components, "entry_points", lambda group: points if group.endswith("service") else [])

    return write


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command; the exit code."""
    monkeypatch.setattr("sys.argv", ["dear-tune", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The version is the distribution's."""
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"dear-tune {version('dear-tune')}\n"


def test_help_imports_no_component() -> None:
    """Listing the commands loads neither torch nor a web framework."""
    script = (
        "import sys, dear_tune.cli\nsys.argv = ['dear-tune', '--help']\n"
        "try: dear_tune.cli.main()\n"
        "finally: print({'torch', 'fastapi', 'sqlalchemy', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stderr == "set()\n"
    assert "serve" in ended.stdout


def test_help_shows_a_components_own_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], contribute: Contribute
) -> None:
    """The help line of a function is its docstring's, that of a group its module's; neither is imported for it."""
    contribute(imports="raise SystemError('imported')", greet="greet", group="group")
    assert run(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert "Greet somebody." in shown
    assert "The module's own words." in shown


def test_a_function_becomes_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], contribute: Contribute
) -> None:
    """An entry point that is a function is a command with its options."""
    contribute(greet="greet")
    assert run(monkeypatch, "greet", "--name", "all") == 0
    assert capsys.readouterr().out == "hello, all\n"


def test_a_typer_becomes_a_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], contribute: Contribute
) -> None:
    """An entry point that is a Typer is a group of commands."""
    contribute(group="group")
    assert run(monkeypatch, "group", "again") == 0
    assert capsys.readouterr().out == "hello, you\n"


def test_a_missing_extra_names_the_pip_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], contribute: Contribute
) -> None:
    """A command whose library is not installed says how to install it, and exits with 2."""
    contribute(imports="import a_library_that_is_missing", greet="greet")
    assert run(monkeypatch, "greet") == 2
    assert "pip install 'dear-tune[service]'" in capsys.readouterr().err


def test_a_broken_module_of_ours_is_a_bug(monkeypatch: pytest.MonkeyPatch, contribute: Contribute) -> None:
    """An import of our own that fails is not taken for a missing extra."""
    contribute(imports="import dear_tune.no_such_module", greet="greet")
    monkeypatch.setattr("sys.argv", ["dear-tune", "greet"])
    with pytest.raises(ModuleNotFoundError, match=r"dear_tune\.no_such_module"):
        main()


def test_wrong_usage_exits_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that does not exist is wrong usage, and the nearest one is named."""
    assert run(monkeypatch, "shw") == 2
    assert "show" in capsys.readouterr().err


def test_interrupted_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends a command without a traceback."""

    def interrupted(_study: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app_module, "show", interrupted)
    assert run(monkeypatch, "interrupted", "a") == 130
    assert "Traceback" not in capsys.readouterr().err
