"""Which transfers run under which compute, and the small runtime that carries it out."""
