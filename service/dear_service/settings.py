"""The service's settings: arguments first, then environment variables `DEAR_TUNE_SERVICE_*`, then the defaults."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from typing_extensions import Self

__all__ = ["ENVIRONMENT_PREFIX", "Settings"]

ENVIRONMENT_PREFIX = "DEAR_TUNE_SERVICE_"


class Settings(BaseSettings):
    """How a service runs. A misspelt argument or environment variable is refused, not ignored.

    Attributes:
        database_url: where studies are kept: `sqlite:///file.db`, or `postgresql://user:password@host/name`.
        host: the address to listen at.
        port: the port to listen at; 0 takes a free one.
        lease_s: seconds that a worker may hold a trial without being heard.
    """

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True)

    database_url: str = "sqlite:///dear-tune.db"
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    lease_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 60.0

    @model_validator(mode="after")
    def _know_every_variable(self) -> Self:
        known = {ENVIRONMENT_PREFIX + name.upper() for name in type(self).model_fields}
        unknown = sorted(
            name for name in os.environ if name.upper().startswith(ENVIRONMENT_PREFIX) and name.upper() not in known
        )
        if unknown:
            raise ValueError(f"no such setting: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        return self
