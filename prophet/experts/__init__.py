"""What a layer is made of: the bank that holds its experts, and the gate that routes to them."""
