"""How a rank notices that another one has failed, or waits for ever, and says so."""
