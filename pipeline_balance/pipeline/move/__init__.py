"""Moving training state: the transaction that every change of where it lives goes through."""
