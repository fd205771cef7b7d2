from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import event, inspect, text
from support.service import report, spec

from dear_service import schema
from dear_service.database import Database
from dear_service.models import Base
from dear_service.settings import Settings
from dear_tune.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx
    from support.postgres import Postgres

    from dear_tune import Client


@pytest.fixture
def empty(database_url: str) -> Iterator[Database]:
    """A database that no service has seen."""
    database = Database(database_url)
    yield database
    database.close()


def tables(database: Database) -> set[str]:
    """The names of all tables."""
    with database.read() as session:
        return set(inspect(session.connection()).get_table_names())


def test_models_and_migrations_agree(empty: Database) -> None:
    """The newest revision is what the models say."""
    schema.upgrade(empty)
    with empty.read() as session:
        connection = session.connection()
        context = MigrationContext.configure(connection, opts={"version_table": schema.VERSION_TABLE})
        assert compare_metadata(context, Base.metadata) == []
        assert schema.current_revision(connection) == schema.head_revision()


def test_every_revision_can_be_undone(empty: Database) -> None:
    """From the newest revision back to an empty database, and up again."""
    schema.upgrade(empty)
    with empty.write() as session:
        command.downgrade(schema.configuration(session.connection()), "base")
    assert tables(empty) == {schema.VERSION_TABLE}
    schema.upgrade(empty)
    assert tables(empty) == {schema.VERSION_TABLE, "studies", "trials", "reports"}


def test_another_tools_revisions_are_left_alone(empty: Database) -> None:
    """A table `alembic_version` of another tool in the same database keeps what it says."""
    with empty.write() as session:
        session.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
        session.execute(text("INSERT INTO alembic_version VALUES ('theirs')"))
    schema.upgrade(empty)
    with empty.read() as session:
        assert session.scalar(text("SELECT version_num FROM alembic_version")) == "theirs"


def test_services_that_start_at_once_upgrade_once(database_url: str) -> None:
    """Four services that find the same empty database all come up."""
    databases = [Database(database_url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda database: schema.upgrade(database), databases))
    assert tables(databases[0]) == {schema.VERSION_TABLE, "studies", "trials", "reports"}
    for database in databases:
        database.close()


def test_connections_that_open_a_new_file_at_once_all_open_it(tmp_path: Path) -> None:
    """SQLite's switch to write-ahead logging keeps to no timeout: one in a few hundred was turned away."""
    together = Barrier(8)

    def version(file: int) -> object:
        database = Database(f"sqlite:///{tmp_path}/{file}.db")
        together.wait(10)
        with database.write() as session:
            mode = session.scalar(text("PRAGMA journal_mode"))
        database.close()
        return mode

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(version, [file for file in range(100) for _ in range(8)])) == {"wal"}


def test_a_newer_schema_is_refused(empty: Database) -> None:
    """A service does not touch a database that a newer version has upgraded."""
    schema.upgrade(empty)
    with empty.write() as session:
        session.execute(text(f"UPDATE {schema.VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(ConfigurationError, match="newer dear-tune"):
        schema.upgrade(empty)


def test_only_an_unknown_revision_is_a_newer_one(empty: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other trouble with the migrations is shown as what it is."""

    def fail(*_: object) -> None:
        raise CommandError("Multiple head revisions are present")

    monkeypatch.setattr(command, "upgrade", fail)
    with pytest.raises(CommandError, match="Multiple head"):
        schema.upgrade(empty)


def test_a_ready_service_says_so(http: httpx.Client) -> None:
    """A service whose database answers is alive and ready."""
    assert [http.get(path).json()["status"] for path in ("/livez", "/readyz")] == ["ok", "ok"]


def test_a_service_without_its_database_is_alive_but_not_ready(
    http: httpx.Client, database: Database, request: pytest.FixtureRequest
) -> None:
    """When the database is taken away, nothing is acknowledged any more: all answer 503, but for liveness."""
    if database.is_sqlite:
        Path(str(database.url.database)).unlink()
    else:
        postgres: Postgres = request.getfixturevalue("postgres")
        postgres.drop(str(database.url.database))
    assert http.get("/v1/studies").status_code == 503
    assert http.post("/v1/studies", json=spec().model_dump(mode="json")).status_code == 503
    answer = http.get("/readyz")
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
    assert http.get("/livez").status_code == 200


def test_a_service_with_another_schema_is_not_ready(http: httpx.Client, database: Database) -> None:
    """When the schema is not the one that this version works with, readiness answers 503."""
    with database.write() as session:
        session.execute(text(f"UPDATE {schema.VERSION_TABLE} SET version_num = '9999'"))
    assert http.get("/readyz").status_code == 503


def test_the_number_of_statements_does_not_grow(client: Client, database: Database) -> None:
    """Every request takes as many statements with ten trials and twenty reports as with one and two."""

    def counted(act: Callable[[], object]) -> int:
        statements: list[str] = []

        def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
            statements.append(statement)

        event.listen(database.engine, "before_cursor_execute", note)
        act()
        event.remove(database.engine, "before_cursor_execute", note)
        return len(statements)

    def measured() -> list[int]:
        worker = f"worker{len(list(client.trials('digits')))}"
        trial = client.suggest("digits", worker).trial
        assert trial is not None
        return [
            counted(lambda: client.suggest("digits", worker)),
            counted(lambda: client.report("digits", trial.number, report(0, worker_id=worker))),
            counted(lambda: client.report("digits", trial.number, report(1, worker_id=worker))),
            counted(lambda: client.study("digits")),
            counted(lambda: list(client.studies())),
            counted(lambda: list(client.trials("digits"))),
            counted(lambda: client.trial("digits", trial.number)),
            counted(lambda: client.recommendation("digits")),
        ]

    client.create_study(spec(max_trials=30))
    first = measured()
    for _ in range(3):
        later = measured()
    assert later == first


def test_moments_are_in_utc(database: Database, client: Client) -> None:
    """Both databases give moments back with their offset."""
    assert client.create_study(spec()).created_at.utcoffset() is not None
    assert str(database)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://", "needs a file"),
        ("sqlite:///:memory:", "needs a file"),
        ("mysql://host/name", "sqlite or postgresql, not in mysql"),
        ("not a url", "not understood"),
        ("postgresql://user:word@host:port/name", "not understood"),
        ("sqlite://host/file.db", "a file and nothing else"),
        ("sqlite:///file.db?mode=memory&uri=true", "a file and nothing else"),
    ],
)
def test_an_unusable_url_is_refused(url: str, message: str) -> None:
    """A database that the service cannot use is refused before it is opened."""
    with pytest.raises(ConfigurationError, match=message):
        Database(url)


@pytest.mark.parametrize("url", ["sqlite:////proc/no/such/folder.db", "postgresql://127.0.0.1:1/none"])
def test_an_unreachable_database_is_refused_at_start(url: str) -> None:
    """A folder that cannot be written, or a server that is not there, is named when the service starts."""
    with pytest.raises(ConfigurationError, match="cannot be used"):
        schema.upgrade(Database(url))


def test_a_password_is_not_shown() -> None:
    """The database's name in messages hides the password."""
    assert "secret" not in str(Database("postgresql://user:secret@host/name"))


def test_a_misspelt_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment variable with the prefix that names no setting is an error, not silence."""
    monkeypatch.setenv("DEAR_TUNE_SERVICE_PROT", "9000")
    with pytest.raises(ValueError, match="no such setting: DEAR_TUNE_SERVICE_PROT"):
        Settings()
