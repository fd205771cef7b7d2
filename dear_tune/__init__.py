"""dear-tune's core: the wire contract, tensor fusion, the client and the tuning method.

It imports neither torch nor a web framework nor a database; those belong to `dear_engine` and `dear_service`.
"""

from importlib.metadata import version

from dear_tune.client import Client
from dear_tune.errors import DearTuneError

__all__ = ["Client", "DearTuneError", "__version__"]

__version__ = version("dear-tune")
