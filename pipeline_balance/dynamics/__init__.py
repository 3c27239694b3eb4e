"""Dynamic models: for each, the mechanism that changes a layer's work while training, and the load that follows."""
