"""Save and load at any number of ranks. A door: the code is in `prophet.engine.checkpoint`."""

from prophet.engine.checkpoint import load, save
from prophet.errors import CheckpointError
from prophet.state.checkpoint_folder import DESCRIPTION

__all__ = ["DESCRIPTION", "CheckpointError", "load", "save"]
