"""Save and load at any number of ranks. A door: the code is in `prophet.engine.checkpoint`."""

from prophet.engine.checkpoint import load, save
from prophet.engine.checkpoint_folder import DESCRIPTION
from prophet.errors import CheckpointError

__all__ = ["DESCRIPTION", "CheckpointError", "load", "save"]
