"""How ranks talk to each other, wait for each other and are started."""
