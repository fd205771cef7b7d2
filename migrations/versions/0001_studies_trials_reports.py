"""Studies, their trials, and the reports on them.

Revision ID: 0001
Revises: none
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """To this revision."""
    _create_studies()
    _create_trials()
    _create_reports()


def downgrade() -> None:
    """Back to an empty database."""
    op.drop_table("reports")
    op.drop_table("trials")
    op.drop_table("studies")


def _create_studies() -> None:
    op.create_table(
        "studies",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("name", sa.String(128), nullable=False, unique=True),
        sa.Column("layers", sa.JSON(), nullable=False),
        sa.Column("fingerprint", sa.JSON(), nullable=False),
        sa.Column("default_threshold_bytes", sa.BigInteger(), nullable=False),
        sa.Column("minimum_threshold_bytes", sa.BigInteger(), nullable=False),
        sa.Column("maximum_threshold_bytes", sa.BigInteger(), nullable=False),
        sa.Column("seed", sa.Integer(), nullable=False),
        sa.Column("max_trials", sa.Integer(), nullable=False),
        sa.Column("iterations_per_trial", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("state_reason", sa.Text(), nullable=False),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.Column("last_heard_at", _MOMENT, nullable=True),
    )


def _create_trials() -> None:
    op.create_table(
        "trials",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("study_id", _ID, sa.ForeignKey("studies.id", ondelete="CASCADE"), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("threshold_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("worker_id", sa.String(128), nullable=True),
        sa.Column("lease_expires_at", _MOMENT, nullable=True),
        sa.Column("failure_reason", sa.Text(), nullable=True),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.Column("finished_at", _MOMENT, nullable=True),
        sa.UniqueConstraint("study_id", "number", name="uq_trials_study_number"),
    )
    running = sa.text("state = 'running'")
    op.create_index(
        "uq_trials_study_running_worker",
        "trials",
        ["study_id", "worker_id"],
        unique=True,
        sqlite_where=running,
        postgresql_where=running,
    )
    op.create_index("ix_trials_study_state_number", "trials", ["study_id", "state", "number"])


def _create_reports() -> None:
    op.create_table(
        "reports",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("trial_id", _ID, sa.ForeignKey("trials.id", ondelete="CASCADE"), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.String(128), nullable=False),
        sa.Column("iteration_times_s", sa.JSON(), nullable=False),
        sa.Column("received_at", _MOMENT, nullable=False),
        sa.UniqueConstraint("trial_id", "sequence", name="uq_reports_trial_sequence"),
    )
