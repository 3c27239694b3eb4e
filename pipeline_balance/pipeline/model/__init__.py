"""Any model as layers in a row: what runs in a stage, what it holds, and what passes between stages."""
