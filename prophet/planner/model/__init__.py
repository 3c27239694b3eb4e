"""What a step costs: the definition of its predicted seconds, and the machine as the core takes it."""
