"""accelerate asks an engine's module for a state dict to export it, and would get one rank's experts."""

from __future__ import annotations

import functools
import sys
from typing import Any

from prophet.convert import original_state_dict


def export_all_experts() -> None:
    """Make `Accelerator.get_state_dict`, which Trainer calls too, return all experts; collective as it always is.

    Nothing happens where accelerate is not in use.
    """
    # Not imported here: where it is not loaded, nobody asks it
    accelerate: Any = sys.modules.get("accelerate")
    if accelerate is None:
        return
    plain = accelerate.Accelerator.get_state_dict
    if getattr(plain, "of_prophet_deepspeed", False):
        return

    @functools.wraps(plain)
    def get_state_dict(accelerator: Any, model: Any, unwrap: bool = True) -> Any:
        # Only engines with balanced experts have it
        if not hasattr(model, "prophet_report"):
            return plain(accelerator, model, unwrap)
        return {name: value.detach().cpu().clone() for name, value in original_state_dict(model.module).items()}

    get_state_dict.of_prophet_deepspeed = True  # type: ignore[attr-defined]
    accelerate.Accelerator.get_state_dict = get_state_dict
