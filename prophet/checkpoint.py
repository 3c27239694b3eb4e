"""Save and load training at any number of ranks. A door: the code is in `prophet.engine.checkpoint.training`."""

from prophet.engine.checkpoint.training import load, save
from prophet.errors import CheckpointError
from prophet.state.checkpoint.folder import DESCRIPTION

__all__ = ["DESCRIPTION", "CheckpointError", "load", "save"]
