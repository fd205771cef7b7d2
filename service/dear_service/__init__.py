"""The tuning service: keeps studies in a database, and tells training jobs which threshold to measure next.

`create_app(settings)` is the ASGI application; `dear-tune serve` runs it.
"""

from dear_service.app import create_app
from dear_service.settings import Settings

__all__ = ["Settings", "create_app"]
