"""An emulated cluster on one machine: hosts with links and processors of their own, and what balancing gains there."""
