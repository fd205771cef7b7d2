"""The demo: a service, two ranks on a slow link, a study from first trial to recommendation."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dear_engine.demo.network import Host, loopback, shaped_link
from dear_engine.demo.processes import child, ended_by_signals
from dear_engine.demo.report import TrainingResult, print_report
from dear_tune.client import Client
from dear_tune.contract import StudyState
from dear_tune.errors import DearTuneError, MissingExtraError, NotFoundError

__all__ = ["demo"]

_DATABASE_URL = "sqlite:///dear-tune.db"
_START_TIMEOUT_S = 60.0
_RUN_TIMEOUT_S = 600.0
_POLL_S = 0.5


def demo(
    database_url: Annotated[
        str,
        typer.Option(
            envvar="DEAR_TUNE_SERVICE_DATABASE_URL",
            help="Where the trials are stored; `dear-tune serve` looks in the same place.",
        ),
    ] = _DATABASE_URL,
    rate_mbit: Annotated[int, typer.Option(min=1, help="The rate of the link between the ranks, in Mbit/s.")] = 400,
    trials: Annotated[int, typer.Option(min=1, help="How many trials to run at the most.")] = 16,
    use_loopback: Annotated[bool, typer.Option("--loopback", help="Do not shape a link, even where possible.")] = False,
) -> None:
    """Tune a real two-rank training run on this machine, from start to end, in under two minutes."""
    if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("sklearn") is None:
        raise MissingExtraError("dear-tune demo", "engine,service")
    console = Console()
    study = f"digits-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        result = _run(console, database_url, study, trials, None if use_loopback else rate_mbit)
    except KeyboardInterrupt:
        console.print("Stopped. Nothing runs on; the trials so far are kept.")
        raise
    console.print(_next_steps(database_url, study), soft_wrap=True)
    if not result.losses_equal:
        raise DearTuneError("The losses differ from DistributedDataParallel's: please report this as a bug.")


def _run(console: Console, database_url: str, study: str, trials: int, rate_mbit: int | None) -> TrainingResult:
    with ended_by_signals() as check, ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="dear-tune-demo-")))
        hosts = stack.enter_context(_hosts(console, rate_mbit))
        url = stack.enter_context(_service(database_url, folder, check))
        client = stack.enter_context(Client(url))
        ranks = stack.enter_context(_ranks(hosts, url, study, trials, folder))
        console.print(f"Tuning service: {url}\nTrials are kept in: {database_url}\nStudy: {study}", soft_wrap=True)
        _follow(console, client, study, trials, ranks, check)
        result = TrainingResult(**json.loads((folder / "result.json").read_text()))
        print_report(console, client, study, result)
        return result


def _next_steps(database_url: str, study: str) -> str:
    command = "dear-tune" if shutil.which("dear-tune") else os.path.relpath(Path(sys.executable).with_name("dear-tune"))
    option = "" if database_url == _DATABASE_URL else f" --database-url {database_url}"
    return (
        "\nThe study is kept. Look at it again:\n"
        f"  {command} serve{option}\n"
        f"  {command} show {study}\n"
        f"  curl http://127.0.0.1:8000/v1/studies/{study}/trials"
    )


@contextmanager
def _hosts(console: Console, rate_mbit: int | None) -> Iterator[tuple[Host, Host]]:
    with ExitStack() as stack:
        hosts = stack.enter_context(shaped_link(rate_mbit)) if rate_mbit else None
        if hosts is None:
            console.print("Network: loopback. It is so fast that there is little to gain from tuning here.")
            if rate_mbit:
                console.print("(A shaped link needs Linux, iproute2, and root with the right to administer networks.)")
        else:
            console.print(f"Network: the ranks are in two namespaces, joined by a link of {rate_mbit} Mbit/s each way.")
        yield hosts or loopback()


@contextmanager
def _service(database_url: str, folder: Path, check: Callable[[], None]) -> Iterator[str]:
    """A service on a free loopback port; its URL."""
    log = folder / "service.log"
    command = [sys.executable, "-m", "dear_tune", "serve", "--port", "0", "--database-url", database_url]
    with log.open("wb") as output, child(command, output=output) as process:
        yield _ready_url(process, log, check)


def _ready_url(process: subprocess.Popen[bytes], log: Path, check: Callable[[], None]) -> str:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        check()
        for line in log.read_text().splitlines():
            if "service ready at " in line:
                return line.rpartition(" ")[2]
        time.sleep(0.05)
    raise DearTuneError(f"The tuning service did not start:\n{log.read_text()}")


@dataclass(frozen=True)
class _Rank:
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def _ranks(hosts: Sequence[Host], url: str, study: str, trials: int, folder: Path) -> Iterator[list[_Rank]]:
    """One rank on each host, each started by a torchrun of its own, as on two machines."""
    port = _free_port(hosts[0].address)
    with ExitStack() as stack:
        ranks = []
        for number, host in enumerate(hosts):
            log = folder / f"rank-{number}.log"
            process = child(
                [
                    *(*host.prefix, sys.executable, "-m", "torch.distributed.run"),
                    *("--nnodes", str(len(hosts)), "--nproc-per-node", "1", "--node-rank", str(number)),
                    *("--master-addr", hosts[0].address, "--master-port", str(port), "--local-addr", host.address),
                    *("-m", "dear_engine.demo.train", "--url", url, "--study", study),
                    *("--max-trials", str(trials), "--result", str(folder / "result.json")),
                ],
                environment={"GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"},
                output=stack.enter_context(log.open("wb")),
            )
            ranks.append(_Rank(stack.enter_context(process), log))
        yield ranks


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _follow(
    console: Console, client: Client, study: str, trials: int, ranks: Sequence[_Rank], check: Callable[[], None]
) -> None:
    """Show progress until all ranks have ended well."""
    deadline = time.monotonic() + _RUN_TIMEOUT_S
    columns = (TextColumn("{task.fields[phase]}"), BarColumn(), TextColumn("{task.completed}/{task.total} trials"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("demo", total=trials, phase="starting two ranks")
        while any(rank.process.poll() is None for rank in ranks):
            check()
            _raise_if_failed(ranks)
            if time.monotonic() > deadline:
                raise DearTuneError(f"The ranks did not end within {_RUN_TIMEOUT_S:.0f} s.\n{_tail(ranks[0].log)}")
            progress.update(task, **_progress(client, study))
            time.sleep(_POLL_S)
        progress.update(task, **_progress(client, study))
    _raise_if_failed(ranks)


def _progress(client: Client, study: str) -> dict[str, Any]:
    try:
        status = client.study(study)
    except NotFoundError:
        return {"phase": "training with DistributedDataParallel first, to compare"}
    done = status.trials.completed + status.trials.failed
    if status.state is StudyState.CONVERGED:
        return {"phase": "converged", "completed": done, "total": done}
    return {"phase": f"tuning: {status.state_reason}", "completed": done}


def _raise_if_failed(ranks: Sequence[_Rank]) -> None:
    for number, rank in enumerate(ranks):
        if rank.process.poll():
            raise DearTuneError(f"Rank {number} ended with status {rank.process.returncode}:\n{_tail(rank.log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])
